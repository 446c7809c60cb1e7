//! The PTX targets that kernels are shipped for, and which of them a device takes.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Capability, CudaVersion, PtxIsa};
use crate::{Error, Result};

/// A `.target` that modules are built for.
///
/// A plain target runs on its own and every newer capability. `sm_90a` runs on 9.0 alone, the family target `sm_120f` on
/// 12.0 and 12.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Target {
    /// Everything that needs no more: asynchronous copies, bf16 and int8 MMA.
    #[serde(rename = "sm_80")]
    Sm80,
    /// FP8 MMA.
    #[serde(rename = "sm_89")]
    Sm89,
    /// Bulk copies, dependent launch, clusters.
    #[serde(rename = "sm_90")]
    Sm90,
    /// `wgmma`.
    #[serde(rename = "sm_90a")]
    Sm90a,
    /// Block-scaled FP4 and FP8 MMA.
    #[serde(rename = "sm_120f")]
    Sm120f,
}

/// All shipped targets, least specific first.
pub const SHIPPED: [Target; 5] = [Target::Sm80, Target::Sm89, Target::Sm90, Target::Sm90a, Target::Sm120f];

impl Target {
    /// The name in a module.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sm80 => "sm_80",
            Self::Sm89 => "sm_89",
            Self::Sm90 => "sm_90",
            Self::Sm90a => "sm_90a",
            Self::Sm120f => "sm_120f",
        }
    }

    /// The lowest PTX version that modules of this target are stamped with.
    #[must_use]
    pub const fn ptx(self) -> PtxIsa {
        match self {
            Self::Sm80 => PtxIsa::new(7, 4),
            Self::Sm89 => PtxIsa::new(8, 4),
            Self::Sm90 | Self::Sm90a => PtxIsa::new(8, 0),
            Self::Sm120f => PtxIsa::new(8, 8),
        }
    }

    /// The capability it is named after.
    #[must_use]
    pub const fn capability(self) -> Capability {
        match self {
            Self::Sm80 => Capability::new(8, 0),
            Self::Sm89 => Capability::new(8, 9),
            Self::Sm90 | Self::Sm90a => Capability::new(9, 0),
            Self::Sm120f => Capability::new(12, 0),
        }
    }

    /// Whether newer capabilities run it too.
    #[must_use]
    pub const fn is_base(self) -> bool {
        matches!(self, Self::Sm80 | Self::Sm89 | Self::Sm90)
    }

    /// Whether a device of this capability runs it, the driver aside.
    #[must_use]
    pub fn runs_on(self, capability: Capability) -> bool {
        match self {
            Self::Sm90a => capability == self.capability(),
            Self::Sm120f => matches!((capability.major, capability.minor), (12, 0 | 1)),
            base => capability >= base.capability(),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What [`select_targets`] chose.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Selection {
    /// The newest base target that device and driver take: what every op can fall back to.
    pub base: Target,
    /// All targets that device and driver take, most specific first.
    pub targets: Vec<Target>,
    /// What a user should be told, one sentence each; empty for a known part with a new enough driver.
    pub notices: Vec<String>,
}

/// Chooses among the targets of a family of kernels.
///
/// A capability newer than those known falls to the nearest lower base target, with a notice. A target whose PTX is too
/// new for the driver is left out, with a notice. `driver: None` stands for a driver that loads everything.
///
/// ```
/// use ninfer_core::capability::{Capability, SHIPPED, Target, select_targets};
/// let gb10 = select_targets(Capability::new(12, 1), None, &SHIPPED)?;
/// assert_eq!(gb10.targets, [Target::Sm120f, Target::Sm90, Target::Sm89, Target::Sm80]);
/// let future = select_targets(Capability::new(13, 0), None, &SHIPPED)?;
/// assert_eq!((future.base, future.notices.len()), (Target::Sm90, 1));
/// # Ok::<(), ninfer_core::Error>(())
/// ```
///
/// # Errors
/// [`Error::Unsupported`] below 8.0 or where no target in `shipped` runs on the part; [`Error::DriverTooOld`] where all
/// that run are too new for the driver.
pub fn select_targets(capability: Capability, driver: Option<CudaVersion>, shipped: &[Target]) -> Result<Selection> {
    let mut fitting: Vec<Target> = shipped.iter().copied().filter(|t| t.runs_on(capability)).collect();
    fitting.sort_by(|a, b| b.cmp(a));
    fitting.dedup();
    let Some(&lowest) = fitting.iter().filter(|t| t.is_base()).min_by_key(|t| t.ptx()) else {
        let oldest = shipped.iter().filter(|t| t.is_base()).min();
        return Err(Error::Unsupported {
            op: "CUDA kernels".to_owned(),
            need: oldest.map_or_else(
                || "a module with a base target".to_owned(),
                |t| format!("compute capability {} or newer", t.capability()),
            ),
            have: capability.to_string(),
        });
    };
    let mut notices = Vec::new();
    let mut targets = Vec::new();
    for target in fitting {
        match driver {
            Some(d) if d.newest_ptx() < target.ptx() => notices.push(format!(
                "{target} kernels are left out: they need a driver for CUDA {}, the installed one supports {d}",
                target.ptx().oldest_cuda().map_or_else(|| "unknown".to_owned(), |c| c.to_string()),
            )),
            _ => targets.push(target),
        }
    }
    let Some(base) = targets.iter().copied().find(|t| t.is_base()) else {
        return Err(Error::DriverTooOld {
            what: format!("{lowest} kernels"),
            have: driver.map_or_else(|| "unknown".to_owned(), |d| d.to_string()),
            need: lowest.ptx().oldest_cuda().map_or_else(|| "unknown".to_owned(), |c| c.to_string()),
        });
    };
    if !capability.is_known() {
        notices.push(format!("compute capability {capability} is not known; its kernels are those of {base}"));
    }
    Ok(Selection { base, targets, notices })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn select(major: u8, minor: u8) -> Selection {
        select_targets(Capability::new(major, minor), None, &SHIPPED).unwrap()
    }

    #[test]
    fn every_part_from_8_0_has_a_base_target() {
        use Target::{Sm80, Sm89, Sm90, Sm90a, Sm120f};
        let cases: [(u8, u8, Target, &[Target]); 11] = [
            (8, 0, Sm80, &[Sm80]),
            (8, 6, Sm80, &[Sm80]),
            (8, 9, Sm89, &[Sm89, Sm80]),
            (9, 0, Sm90, &[Sm90a, Sm90, Sm89, Sm80]),
            (10, 0, Sm90, &[Sm90, Sm89, Sm80]),
            (10, 3, Sm90, &[Sm90, Sm89, Sm80]),
            (11, 0, Sm90, &[Sm90, Sm89, Sm80]),
            (12, 0, Sm90, &[Sm120f, Sm90, Sm89, Sm80]),
            (12, 1, Sm90, &[Sm120f, Sm90, Sm89, Sm80]),
            (12, 2, Sm90, &[Sm90, Sm89, Sm80]),
            (13, 0, Sm90, &[Sm90, Sm89, Sm80]),
        ];
        for (major, minor, base, targets) in cases {
            let s = select(major, minor);
            assert_eq!((s.base, s.targets.as_slice()), (base, targets), "{major}.{minor}");
            assert_eq!(s.notices.len(), usize::from(!Capability::new(major, minor).is_known()), "{major}.{minor}");
        }
        assert!(select(12, 2).notices[0].contains("12.2") && select(13, 0).notices[0].contains("sm_90"));
    }

    #[test]
    fn older_parts_are_refused_with_both_numbers() {
        for (major, minor) in [(0, 0), (5, 2), (7, 0), (7, 5)] {
            let c = Capability::new(major, minor);
            let error = select_targets(c, None, &SHIPPED).unwrap_err();
            assert_eq!(
                error,
                Error::Unsupported {
                    op: "CUDA kernels".into(),
                    need: "compute capability 8.0 or newer".into(),
                    have: c.to_string()
                }
            );
        }
        assert!(select_targets(Capability::new(9, 0), None, &[]).is_err());
        assert!(select_targets(Capability::new(9, 0), None, &[Target::Sm120f, Target::Sm90a]).is_err());
    }

    #[test]
    fn rtx_50_on_an_older_driver_falls_back_with_a_notice() {
        let s = select_targets(Capability::new(12, 0), Some(CudaVersion::new(12, 8)), &SHIPPED).unwrap();
        assert_eq!(s.targets, [Target::Sm90, Target::Sm89, Target::Sm80]);
        assert!(s.notices.len() == 1 && s.notices[0].contains("sm_120f") && s.notices[0].contains("12.9"));
    }

    #[test]
    fn a_driver_too_old_for_every_target_is_named() {
        let error = select_targets(Capability::new(8, 6), Some(CudaVersion::new(10, 2)), &SHIPPED).unwrap_err();
        assert_eq!(
            error,
            Error::DriverTooOld { what: "sm_80 kernels".into(), have: "10.2".into(), need: "11.4".into() }
        );
    }

    #[test]
    fn order_and_repetition_of_the_shipped_list_do_not_matter() {
        let list = [Target::Sm90, Target::Sm80, Target::Sm90, Target::Sm90a];
        let s = select_targets(Capability::new(9, 0), None, &list).unwrap();
        assert_eq!(s.targets, [Target::Sm90a, Target::Sm90, Target::Sm80]);
    }
}
