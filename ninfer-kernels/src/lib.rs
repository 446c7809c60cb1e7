//! ninfer-kernels
