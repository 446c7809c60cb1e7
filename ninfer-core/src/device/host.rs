//! What the operating system says about this machine.

use std::fs;

/// Memory of the host, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostMemory {
    /// Installed, or allowed to this group of processes.
    pub total: u64,
    /// What can be taken without swapping: free memory and the page cache that can be dropped.
    pub available: u64,
}

impl HostMemory {
    /// Reads `/proc/meminfo` and the limit of the control group; `None` on systems without them.
    #[must_use]
    pub fn detect() -> Option<Self> {
        let memory = Self::parse(&fs::read_to_string("/proc/meminfo").ok()?)?;
        let limit = fs::read_to_string("/sys/fs/cgroup/memory.max").ok().and_then(|text| text.trim().parse().ok());
        Some(memory.limited(limit))
    }

    /// Reads the text of `/proc/meminfo`. Kernels before 3.14 have no `MemAvailable`; there free memory, buffers and page
    /// cache are added up. `None` where the total is missing.
    ///
    /// ```
    /// use ninfer_core::device::HostMemory;
    /// let text = "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 600 kB\n";
    /// assert_eq!(HostMemory::parse(text), Some(HostMemory { total: 1_024_000, available: 614_400 }));
    /// ```
    #[must_use]
    pub fn parse(meminfo: &str) -> Option<Self> {
        let total = field(meminfo, "MemTotal")?;
        let available = field(meminfo, "MemAvailable").unwrap_or_else(|| {
            ["MemFree", "Buffers", "Cached"]
                .iter()
                .fold(0, |sum: u64, name| sum.saturating_add(field(meminfo, name).unwrap_or(0)))
        });
        Some(Self { total, available: available.min(total) })
    }

    /// The smaller of these figures and a limit.
    #[must_use]
    pub fn limited(self, limit: Option<u64>) -> Self {
        let limit = limit.unwrap_or(u64::MAX);
        Self { total: self.total.min(limit), available: self.available.min(limit) }
    }
}

/// A field in kB, as bytes.
fn field(meminfo: &str, name: &str) -> Option<u64> {
    let value = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let mut words = value.split_ascii_whitespace();
    let number: u64 = words.next()?.parse().ok()?;
    match words.next() {
        Some("kB") => number.checked_mul(1024),
        None => Some(number),
        Some(_) => None,
    }
}

/// Threads that run at once.
pub(super) fn threads() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX))
}

/// Name of the processor, or of its architecture.
pub(super) fn processor_name() -> String {
    fs::read_to_string("/proc/cpuinfo")
        .ok()
        .and_then(|text| model_name(&text).map(str::to_owned))
        .unwrap_or_else(|| format!("{} CPU", std::env::consts::ARCH))
}

/// The first model name in the text of `/proc/cpuinfo`.
fn model_name(cpuinfo: &str) -> Option<&str> {
    cpuinfo.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        let value = value.trim();
        (key.trim() == "model name" && !value.is_empty()).then_some(value)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn available_memory_is_taken_and_not_free_memory() {
        let text =
            "MemTotal:       16000000 kB\nMemFree:          500000 kB\nMemAvailable:   12000000 kB\nCached: 9 kB\n";
        assert_eq!(HostMemory::parse(text).map(|m| m.available), Some(12_000_000 * 1024));
    }

    #[test]
    fn old_kernels_add_up_the_cache() {
        let text = "MemTotal: 100 kB\nMemFree: 10 kB\nBuffers: 5 kB\nCached: 20 kB\nSwapCached: 40 kB\n";
        assert_eq!(HostMemory::parse(text).map(|m| m.available), Some(35 * 1024));
    }

    #[test]
    fn damaged_text_is_not_believed() {
        assert_eq!(HostMemory::parse(""), None);
        assert_eq!(HostMemory::parse("MemTotal: many kB\n"), None);
        assert_eq!(HostMemory::parse("MemTotal: 5 MB\n"), None);
        assert_eq!(HostMemory::parse("MemTotal: 18446744073709551615 kB\n"), None);
        let more = HostMemory::parse("MemTotal: 1 kB\nMemAvailable: 2 kB\n");
        assert_eq!(more, Some(HostMemory { total: 1024, available: 1024 }));
    }

    #[test]
    fn a_group_limit_holds() {
        let memory = HostMemory { total: 100, available: 60 };
        assert_eq!(memory.limited(None), memory);
        assert_eq!(memory.limited(Some(80)), HostMemory { total: 80, available: 60 });
        assert_eq!(memory.limited(Some(50)), HostMemory { total: 50, available: 50 });
    }

    #[test]
    fn processor_name_is_the_first_model() {
        assert_eq!(
            model_name("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nmodel name: b\n"),
            Some("Some CPU @ 2 GHz")
        );
        assert_eq!(model_name("model\t: 5\nmodel name\t:\n"), None);
    }

    proptest! {
        #[test]
        fn any_text_is_survived(text in ".*") {
            let _ = (HostMemory::parse(&text), model_name(&text));
        }
    }
}
