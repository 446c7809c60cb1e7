//! What kernels report: the first error of the work since the last synchronisation.

use std::sync::Arc;

use ninfer_core::{Error, Result};

use super::driver::{Context, Pinned};

/// Words of the report: code, then two facts.
const WORDS: usize = 4;

/// Mapped host memory that a kernel writes only when something is wrong: `Report` of `common/report.cuh`.
#[derive(Debug)]
pub(super) struct DeviceReport(Pinned);

impl DeviceReport {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        Pinned::new(context, WORDS * 4).map(Self)
    }

    pub(super) fn address(&self) -> u64 {
        self.0.device
    }

    /// The error of the work before the last synchronisation, if there is one; clears it.
    pub(super) fn take(&mut self) -> Result<()> {
        let mut words = [0u32; WORDS];
        bytemuck::cast_slice_mut(&mut words).copy_from_slice(&self.0.bytes()[..WORDS * 4]);
        if words[0] == 0 {
            return Ok(());
        }
        self.0.bytes_mut().fill(0);
        Err(decode(words))
    }
}

/// The error of a report; the codes are those of `common/report.cuh`.
fn decode([code, got, limit, _]: [u32; WORDS]) -> Error {
    let out_of_range = |what| Error::OutOfRange { what, got: got.to_string(), legal: format!("below {limit}") };
    match code {
        1 => out_of_range("token id"),
        2 => out_of_range("hidden row"),
        3 => out_of_range("source row"),
        4 => out_of_range("destination row"),
        5 => out_of_range("sequence slot"),
        6 => Error::ContextOverflow { requested: got as usize, limit: limit as usize },
        7 => out_of_range("recorded columns"),
        8 => out_of_range("columns of a round"),
        9 => out_of_range("rows of a segment"),
        10 => out_of_range("folded columns"),
        11 => out_of_range("fold of a segment"),
        12 => out_of_range("bank of a segment"),
        code => Error::Corrupt { reason: format!("a kernel reported the unknown code {code}") },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_become_typed_errors() {
        assert_eq!(
            decode([1, 300, 256, 0]),
            Error::OutOfRange { what: "token id", got: "300".into(), legal: "below 256".into() }
        );
        assert_eq!(decode([6, 128, 64, 0]), Error::ContextOverflow { requested: 128, limit: 64 });
        assert!(matches!(decode([99, 0, 0, 0]), Error::Corrupt { .. }));
    }
}
