//! Shipped PTX; written by `cargo xtask ptx`.

use super::kernels::Image;

pub(super) const IMAGES: &[Image] = &[];
