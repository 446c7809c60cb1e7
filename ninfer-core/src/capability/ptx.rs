//! CUDA versions and the PTX versions their drivers accept.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::parse_pair;
use crate::{Error, Result};

/// CUDA version a driver supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CudaVersion {
    /// Major number.
    pub major: u16,
    /// Minor number.
    pub minor: u16,
}

/// PTX version a CUDA release introduced. 12.6 and 11.0 … 11.8 follow the pattern of their neighbours. Sources: the
/// release table of the PTX manual; 8.7, 8.8, 9.0 and 9.5 read off compiler output.
const INTRODUCED: [((u16, u16), (u16, u16)); 24] = [
    ((11, 0), (7, 0)),
    ((11, 1), (7, 1)),
    ((11, 2), (7, 2)),
    ((11, 3), (7, 3)),
    ((11, 4), (7, 4)),
    ((11, 5), (7, 5)),
    ((11, 6), (7, 6)),
    ((11, 7), (7, 7)),
    ((11, 8), (7, 8)),
    ((12, 0), (8, 0)),
    ((12, 1), (8, 1)),
    ((12, 2), (8, 2)),
    ((12, 3), (8, 3)),
    ((12, 4), (8, 4)),
    ((12, 5), (8, 5)),
    ((12, 7), (8, 6)),
    ((12, 8), (8, 7)),
    ((12, 9), (8, 8)),
    ((13, 0), (9, 0)),
    ((13, 1), (9, 1)),
    ((13, 2), (9, 2)),
    ((13, 3), (9, 3)),
    ((13, 4), (9, 4)),
    ((13, 5), (9, 5)),
];

impl CudaVersion {
    /// From the two numbers.
    #[must_use]
    pub const fn new(major: u16, minor: u16) -> Self {
        Self { major, minor }
    }

    /// From the driver's number, `1000 · major + 10 · minor` (12080 is 12.8). Numbers that no driver reports become the
    /// nearest that is representable.
    ///
    /// ```
    /// use ninfer_core::capability::CudaVersion;
    /// assert_eq!(CudaVersion::from_driver(12080).to_string(), "12.8");
    /// ```
    #[must_use]
    pub fn from_driver(number: i32) -> Self {
        let number = number.max(0);
        Self { major: u16::try_from(number / 1000).unwrap_or(u16::MAX), minor: (number % 1000 / 10) as u16 }
    }

    /// The newest PTX version the driver is known to accept. A driver newer than the table accepts at least the table's
    /// last row; one older than CUDA 11 accepts none that is shipped.
    #[must_use]
    pub fn newest_ptx(self) -> PtxIsa {
        INTRODUCED
            .iter()
            .rev()
            .find(|((major, minor), _)| (*major, *minor) <= (self.major, self.minor))
            .map_or(PtxIsa::new(0, 0), |&(_, (major, minor))| PtxIsa::new(major, minor))
    }
}

/// Version of the PTX language, the `.version` of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PtxIsa {
    /// Major number.
    pub major: u16,
    /// Minor number.
    pub minor: u16,
}

impl PtxIsa {
    /// From the two numbers.
    #[must_use]
    pub const fn new(major: u16, minor: u16) -> Self {
        Self { major, minor }
    }

    /// The oldest CUDA version whose driver accepts it; `None` for a version newer than the table.
    ///
    /// ```
    /// use ninfer_core::capability::{CudaVersion, PtxIsa};
    /// assert_eq!(PtxIsa::new(8, 8).oldest_cuda(), Some(CudaVersion::new(12, 9)));
    /// ```
    #[must_use]
    pub fn oldest_cuda(self) -> Option<CudaVersion> {
        INTRODUCED
            .iter()
            .find(|(_, (major, minor))| (*major, *minor) >= (self.major, self.minor))
            .map(|&((major, minor), _)| CudaVersion::new(major, minor))
    }
}

/// Fails where a driver cannot load a module of PTX version `module`; to be asked before loading, since the driver's own
/// error does not say what is needed.
///
/// # Errors
/// [`Error::DriverTooOld`] with both CUDA versions.
pub fn check_ptx(what: &str, module: PtxIsa, driver: CudaVersion) -> Result<()> {
    if driver.newest_ptx() >= module {
        return Ok(());
    }
    let need = module.oldest_cuda().map_or_else(|| format!("a version with PTX {module}"), |c| c.to_string());
    Err(Error::DriverTooOld { what: what.to_owned(), have: driver.to_string(), need })
}

macro_rules! version_text {
    ($type:ty, $what:literal) => {
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&format!("{}.{}", self.major, self.minor))
            }
        }

        impl FromStr for $type {
            type Err = Error;

            fn from_str(s: &str) -> Result<Self> {
                parse_pair(s).map(|(major, minor)| Self { major, minor }).ok_or_else(|| Error::OutOfRange {
                    what: $what,
                    got: s.to_owned(),
                    legal: "two numbers such as 8.7".to_owned(),
                })
            }
        }

        impl TryFrom<String> for $type {
            type Error = Error;

            fn try_from(s: String) -> Result<Self> {
                s.parse()
            }
        }

        impl From<$type> for String {
            fn from(v: $type) -> Self {
                v.to_string()
            }
        }
    };
}

version_text!(CudaVersion, "CUDA version");
version_text!(PtxIsa, "PTX version");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_newer_than_the_driver_names_both_versions() {
        let driver = CudaVersion::from_driver(12080);
        let error = check_ptx("gdn", "9.5".parse().unwrap(), driver).unwrap_err();
        assert_eq!(error, Error::DriverTooOld { what: "gdn".into(), need: "13.5".into(), have: "12.8".into() });
        assert!(error.help().contains("update"));
        assert_eq!(check_ptx("gdn", PtxIsa::new(8, 7), driver), Ok(()));
        assert!(check_ptx("gdn", PtxIsa::new(8, 8), driver).is_err());
        assert!(check_ptx("gdn", PtxIsa::new(99, 0), driver).unwrap_err().to_string().contains("99.0"));
    }

    #[test]
    fn drivers_accept_what_they_are_known_to() {
        let ptx = |major, minor| CudaVersion::new(major, minor).newest_ptx().to_string();
        assert_eq!(ptx(12, 0), "8.0");
        assert_eq!(ptx(12, 6), "8.5");
        assert_eq!(ptx(13, 0), "9.0");
        assert_eq!(ptx(13, 9), "9.5");
        assert_eq!(ptx(14, 0), "9.5");
        assert_eq!(ptx(10, 2), "0.0");
    }

    #[test]
    fn table_is_ascending() {
        assert!(INTRODUCED.windows(2).all(|w| w[0].0 < w[1].0 && w[0].1 < w[1].1));
        for ((cuda_major, cuda_minor), (major, minor)) in INTRODUCED {
            let cuda = CudaVersion::new(cuda_major, cuda_minor);
            assert_eq!(PtxIsa::new(major, minor).oldest_cuda(), Some(cuda));
            assert_eq!(cuda.newest_ptx(), PtxIsa::new(major, minor));
        }
    }

    #[test]
    fn driver_numbers_never_panic() {
        assert_eq!(CudaVersion::from_driver(13000), CudaVersion::new(13, 0));
        for n in [i32::MIN, -1, 0, 1, i32::MAX] {
            let _ = CudaVersion::from_driver(n).newest_ptx();
        }
        assert!("12".parse::<CudaVersion>().is_err());
    }
}
