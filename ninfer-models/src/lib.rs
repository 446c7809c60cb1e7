//! ninfer-models
