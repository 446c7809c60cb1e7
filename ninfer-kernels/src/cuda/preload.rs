//! Loading kernels ahead of their first use.

use ninfer_core::{Error, Result};

use super::Cuda;
use super::kernels::images;

impl Cuda {
    /// Has the driver compile every shipped kernel that runs on this device, so that none is compiled later and
    /// [`kernel_report`](Self::kernel_report) lists them all.
    ///
    /// # Errors
    /// [`Error::Driver`] with the log of the driver's compiler.
    pub fn load_kernels(&self) -> Result<()> {
        for image in images() {
            for &entry in image.entries {
                match self.kernels().get(image.family, entry, 0) {
                    // Made for other devices.
                    Ok(_) | Err(Error::Unsupported { .. }) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }
}
