//! ninfer-quant
