//! What a CUDA device can execute: compute capability, the features it implies, PTX versions, and which of the shipped
//! PTX targets it takes.
//!
//! Everything here is a pure function of the compute capability and of the CUDA version the driver reports; this is the
//! one place that knows architectures. A route asks for a [`Feature`], never for an architecture number.

mod features;
mod ptx;
mod target;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

pub use self::features::{Feature, Features, Nvfp4Route, nvfp4_route};
pub use self::ptx::{CudaVersion, PtxIsa, check_ptx};
pub use self::target::{SHIPPED, Selection, Target, select_targets};
use crate::Error;

/// Compute capability, ordered.
///
/// ```
/// use ninfer_core::capability::Capability;
/// let c: Capability = "12.1".parse()?;
/// assert!(c > Capability::new(9, 0));
/// assert_eq!(c.to_string(), "12.1");
/// # Ok::<(), ninfer_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Capability {
    /// Architecture family.
    pub major: u8,
    /// Part within the family.
    pub minor: u8,
}

impl Capability {
    /// The oldest capability any kernel runs on.
    pub const OLDEST: Self = Self::new(8, 0);

    /// Capabilities of parts known when this was written.
    pub const KNOWN: [Self; 11] = [
        Self::new(8, 0),
        Self::new(8, 6),
        Self::new(8, 7),
        Self::new(8, 8),
        Self::new(8, 9),
        Self::new(9, 0),
        Self::new(10, 0),
        Self::new(10, 3),
        Self::new(11, 0),
        Self::new(12, 0),
        Self::new(12, 1),
    ];

    /// From the two numbers.
    #[must_use]
    pub const fn new(major: u8, minor: u8) -> Self {
        Self { major, minor }
    }

    /// Whether parts of this capability existed when this was written.
    #[must_use]
    pub fn is_known(self) -> bool {
        Self::KNOWN.contains(&self)
    }

    /// Shared memory of an SM in bytes, as the vendor's programming guide lists it. An unknown part is taken to have no
    /// more than the smallest known one.
    #[must_use]
    pub const fn shared_per_sm(self) -> u32 {
        match (self.major, self.minor) {
            (8, 0 | 7) => 164 << 10,
            (9, 0) | (10, 0 | 3) | (11, 0) => 228 << 10,
            _ => 100 << 10,
        }
    }

    /// Shared memory a block can opt in to, in bytes: 1 KiB of each SM's is kept by the system.
    #[must_use]
    pub const fn shared_per_block_optin(self) -> u32 {
        self.shared_per_sm() - 1024
    }

    /// Resident threads of an SM. An unknown part is taken to have no more than the smallest known one.
    #[must_use]
    pub const fn threads_per_sm(self) -> u32 {
        match (self.major, self.minor) {
            (8 | 9, 0) | (10, 0 | 3) => 2048,
            _ => 1536,
        }
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}.{}", self.major, self.minor))
    }
}

impl FromStr for Capability {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        parse_pair(s).map(|(major, minor)| Self { major, minor }).ok_or_else(|| Error::OutOfRange {
            what: "compute capability",
            got: s.to_owned(),
            legal: "two numbers such as 9.0".to_owned(),
        })
    }
}

impl TryFrom<String> for Capability {
    type Error = Error;

    fn try_from(s: String) -> Result<Self, Error> {
        s.parse()
    }
}

impl From<Capability> for String {
    fn from(c: Capability) -> Self {
        c.to_string()
    }
}

/// Parses `a.b`, digits only.
fn parse_pair<T: FromStr>(s: &str) -> Option<(T, T)> {
    let number = |s: &str| if s.bytes().all(|b| b.is_ascii_digit()) { s.parse().ok() } else { None };
    let (major, minor) = s.split_once('.')?;
    Some((number(major)?, number(minor)?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn shared_memory_of_known_parts() {
        let optin = |major, minor| Capability::new(major, minor).shared_per_block_optin() >> 10;
        assert_eq!([optin(8, 0), optin(8, 6), optin(8, 9), optin(9, 0), optin(12, 0)], [163, 99, 99, 227, 99]);
        assert_eq!(optin(13, 0), 99);
    }

    #[test]
    fn bad_text_is_an_error() {
        for text in ["", "9", "9.", ".0", "9.0.1", "+9.0", "256.0", "9.-1", " 9.0"] {
            assert!(text.parse::<Capability>().is_err(), "{text:?}");
        }
        assert!(serde_json::from_str::<Capability>("\"x\"").is_err());
    }

    proptest! {
        #[test]
        fn text_round_trips(major: u8, minor: u8) {
            let c = Capability::new(major, minor);
            prop_assert_eq!(c.to_string().parse::<Capability>(), Ok(c));
            let json = serde_json::to_string(&c).unwrap();
            prop_assert_eq!(serde_json::from_str::<Capability>(&json).unwrap(), c);
        }

        #[test]
        fn any_text_is_parsed_or_refused(text in ".*") {
            let _ = text.parse::<Capability>();
        }
    }
}
