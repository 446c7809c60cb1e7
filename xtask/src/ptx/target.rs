//! What kernels are compiled for, and which devices and assemblers take the result.

use super::toolchain::Assembler;

/// A `.target` of compiled kernels.
#[derive(Debug, PartialEq, Eq)]
pub struct Target {
    /// The name in a module and in the first lines of a family.
    pub name: &'static str,
    /// The variant of `ninfer_core::capability::Target`.
    pub variant: &'static str,
    /// What the compiler calls it.
    pub compute: &'static str,
    /// The `.version` that its modules are stamped with: the lowest with which they assemble.
    pub version: (u16, u16),
    /// Devices that run it, of those whose assembly is checked.
    pub devices: &'static [&'static str],
    /// Devices whose registers are written down.
    pub measured: &'static [&'static str],
    /// The oldest assembler that takes its modules.
    pub oldest: Assembler,
    /// The plain target next to it, which must refuse its modules; none for a plain target.
    pub refused_by: Option<&'static str>,
}

/// All targets, least specific first.
pub const ALL: [Target; 5] = [
    Target {
        name: "sm_80",
        variant: "Sm80",
        compute: "compute_80",
        version: (7, 4),
        devices: &["sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120", "sm_120a", "sm_121", "sm_121a"],
        measured: &["sm_80", "sm_89", "sm_90", "sm_120"],
        oldest: Assembler::Oldest,
        refused_by: None,
    },
    Target {
        name: "sm_89",
        variant: "Sm89",
        compute: "compute_89",
        version: (8, 4),
        devices: &["sm_89", "sm_90", "sm_90a", "sm_100", "sm_120", "sm_120a", "sm_121", "sm_121a"],
        measured: &["sm_89", "sm_120"],
        oldest: Assembler::Release,
        refused_by: None,
    },
    Target {
        name: "sm_90",
        variant: "Sm90",
        compute: "compute_90",
        version: (8, 0),
        devices: &["sm_90", "sm_90a", "sm_100", "sm_120", "sm_120a", "sm_121", "sm_121a"],
        measured: &["sm_90", "sm_120"],
        oldest: Assembler::Oldest,
        refused_by: None,
    },
    Target {
        name: "sm_90a",
        variant: "Sm90a",
        compute: "compute_90a",
        version: (8, 0),
        devices: &["sm_90a"],
        measured: &["sm_90a"],
        oldest: Assembler::Oldest,
        refused_by: Some("sm_90"),
    },
    Target {
        name: "sm_120f",
        variant: "Sm120f",
        compute: "compute_120f",
        version: (8, 8),
        devices: &["sm_120", "sm_120a", "sm_121", "sm_121a"],
        measured: &["sm_120"],
        oldest: Assembler::Release,
        refused_by: Some("sm_120"),
    },
];

/// Devices that the oldest assembler knows.
const KNOWN_TO_OLDEST: [&str; 5] = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_90a"];

impl Target {
    /// The target of a name.
    pub fn named(name: &str) -> Option<&'static Self> {
        const TARGETS: &[Target] = &ALL;
        TARGETS.iter().find(|t| t.name == name)
    }

    /// The stamp as it stands in a module.
    pub fn version_text(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    /// Each assembler and device that must take the target's modules.
    pub fn assemblies(&self) -> Vec<(Assembler, &'static str)> {
        let known = |&&d: &&&str| self.oldest != Assembler::Oldest || KNOWN_TO_OLDEST.contains(&d);
        let old = self.devices.iter().filter(known).map(|&d| (self.oldest, d));
        old.chain(self.devices.iter().map(|&d| (Assembler::Newest, d))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_target_is_assembled_for_its_own_device_by_two_assemblers() {
        for target in &ALL {
            let own = target.name.replace("120f", "120");
            for assembler in [target.oldest, Assembler::Newest] {
                assert!(target.assemblies().contains(&(assembler, &own)), "{} by {assembler:?}", target.name);
            }
            assert!(target.measured.iter().all(|d| target.devices.contains(d)), "{}", target.name);
            assert_eq!(Target::named(target.name), Some(target));
        }
        assert_eq!(Target::named("sm_120"), None);
    }

    #[test]
    fn the_oldest_assembler_is_not_asked_for_devices_that_came_later() {
        let old = ALL.iter().flat_map(Target::assemblies).filter(|(a, _)| *a == Assembler::Oldest);
        let devices: Vec<_> = old.map(|(_, d)| d).collect();
        assert!(!devices.is_empty() && !devices.iter().any(|d| d.starts_with("sm_1")), "{devices:?}");
    }
}
