//! Sizes in bytes on the command line.

use std::str::FromStr;

/// Units, a longer name before those it ends with.
const UNITS: [(&str, u64); 9] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("kB", 1_000),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("B", 1),
];

/// A number of bytes, at least 1, such as `5GB`, `512MiB` or `1000`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (digits, unit) =
            UNITS.into_iter().find_map(|(name, unit)| Some((text.strip_suffix(name)?, unit))).unwrap_or((text, 1));
        let bytes = digits.trim_end().parse::<u64>().ok().and_then(|n| n.checked_mul(unit)).filter(|&n| n > 0);
        bytes.map(Self).ok_or_else(|| "expected a number of bytes such as 5GB, 512MiB or 1000000".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_known() {
        let sizes = ["5GB", "512MiB", "1 kB", "7B", "1000000", "2TiB"].map(|t| t.parse::<Size>().unwrap().0);
        assert_eq!(sizes, [5_000_000_000, 512 << 20, 1_000, 7, 1_000_000, 2 << 40]);
        for text in ["", "GB", "0", "-1", "1.5GB", "5 XB", "99999999999GiB"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }
}
