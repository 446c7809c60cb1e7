//! ninfer-spec
