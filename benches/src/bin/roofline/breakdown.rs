//! Time of a step by kernels.

use ninfer_examples::table::{Align, Table, grouped};
use serde::{Deserialize, Serialize};

use crate::report::{Kind, median};

/// One launch of a step, with its time in one replay.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    pub name: &'static str,
    pub grid: [u32; 3],
    pub block: u32,
    pub shared_bytes: u32,
    pub seconds: f64,
}

/// Registers and bytes of local memory of a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    pub registers: u32,
    pub local_bytes: u32,
}

/// Launches of one kernel with one size in a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KernelRow {
    pub name: String,
    pub grid: [u32; 3],
    pub block: u32,
    /// Dynamic, of a block.
    pub shared_bytes: u32,
    /// Of a thread.
    pub registers: u32,
    pub local_bytes: u32,
    pub launches: usize,
    /// All of them together: the sum of the median of each over the steps.
    pub seconds: f64,
}

/// A step whose kernels ran one after another.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Breakdown {
    /// Steps or rounds.
    pub kind: Kind,
    pub prompt: usize,
    pub kv: String,
    /// Steps of which medians were taken.
    pub steps: usize,
    /// Time between two events with nothing between them, which is in the time of each launch.
    pub floor: f64,
    /// The recorded step on the device, without events in it.
    pub replay_seconds: f64,
    /// The most time first.
    pub kernels: Vec<KernelRow>,
}

/// Launches of equal kernel and size together, by their median over the steps; the most time first. Steps with another
/// number of launches than the first are left out.
pub fn group(steps: &[Vec<Launch>], resources: impl Fn(&str) -> Resources) -> Vec<KernelRow> {
    let Some(first) = steps.first() else { return Vec::new() };
    let alike: Vec<_> = steps.iter().filter(|s| s.len() == first.len()).collect();
    let mut rows: Vec<KernelRow> = Vec::new();
    for (i, launch) in first.iter().enumerate() {
        let times: Vec<f64> = alike.iter().filter_map(|s| s.get(i)).map(|l| l.seconds).collect();
        let seconds = median(&times).unwrap_or_default();
        let Launch { name, grid, block, shared_bytes, .. } = *launch;
        let same = |r: &&mut KernelRow| {
            (r.name.as_str(), r.grid, r.block, r.shared_bytes) == (name, grid, block, shared_bytes)
        };
        if let Some(row) = rows.iter_mut().find(same) {
            row.launches += 1;
            row.seconds += seconds;
            continue;
        }
        let Resources { registers, local_bytes } = resources(name);
        let name = name.to_owned();
        rows.push(KernelRow { name, grid, block, shared_bytes, registers, local_bytes, launches: 1, seconds });
    }
    rows.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    rows
}

impl Breakdown {
    /// All kernels, one after another.
    pub fn serial_seconds(&self) -> f64 {
        self.kernels.iter().map(|k| k.seconds).sum()
    }

    fn launches(&self) -> usize {
        self.kernels.iter().map(|k| k.launches).sum()
    }

    pub fn title(&self) -> String {
        let what = if self.kind == Kind::Round { "round with drafts" } else { "step" };
        format!(
            "Kernels of a {what} behind {}, {}: one after another, each with the {:.2} µs of its event, medians of {} steps",
            grouped(self.prompt as u64),
            self.kv,
            self.floor * 1e6,
            self.steps
        )
    }

    pub fn table(&self) -> Table {
        let heads = ["launches", "grid", "threads", "shared", "registers", "local", "µs each", "µs", "share"];
        let columns: Vec<_> =
            std::iter::once(("kernel", Align::Left)).chain(heads.into_iter().map(|h| (h, Align::Right))).collect();
        let mut table = Table::new(&columns);
        let all = self.serial_seconds();
        for k in &self.kernels {
            table.row([
                k.name.clone(),
                k.launches.to_string(),
                k.grid.map(|n| n.to_string()).join("×"),
                k.block.to_string(),
                k.shared_bytes.to_string(),
                k.registers.to_string(),
                k.local_bytes.to_string(),
                format!("{:.2}", k.seconds / k.launches as f64 * 1e6),
                format!("{:.1}", k.seconds * 1e6),
                format!("{:.3}", k.seconds / all),
            ]);
        }
        table
    }

    /// The sum against the step as it is.
    pub fn summary(&self) -> String {
        let (serial, launches) = (self.serial_seconds(), self.launches());
        format!(
            "{launches} launches: {:.1} µs one after another, {:.1} µs without the events' own time; replayed without \
             events {:.1} µs ({:.2} of the sum)\n",
            serial * 1e6,
            (serial - self.floor * launches as f64) * 1e6,
            self.replay_seconds * 1e6,
            self.replay_seconds / serial
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(name: &'static str, blocks: u32, seconds: f64) -> Launch {
        Launch { name, grid: [blocks, 1, 1], block: 256, shared_bytes: 0, seconds }
    }

    #[test]
    fn launches_are_grouped_by_kernel_and_size() {
        let step = |x: f64| vec![launch("a", 1, x), launch("b", 2, 9.0), launch("a", 1, 2.0 * x), launch("a", 4, 0.5)];
        let short = vec![launch("a", 1, 100.0)];
        let steps = [step(1.0), step(2.0), short, step(50.0)];
        let rows = group(&steps, |name| Resources { registers: name.len() as u32, local_bytes: 0 });
        let found: Vec<_> = rows.iter().map(|r| (r.name.as_str(), r.grid[0], r.launches, r.seconds)).collect();
        assert_eq!(found, [("b", 2, 1, 9.0), ("a", 1, 2, 6.0), ("a", 4, 1, 0.5)]);
        assert!(rows.iter().all(|r| r.registers == 1));
        assert_eq!(group(&[], |_| Resources::default()), []);
    }

    #[test]
    fn the_sum_stands_against_the_replay() {
        let kernels = group(&[vec![launch("a", 1, 3e-6), launch("b", 1, 5e-6)]], |_| Resources::default());
        let kv = "i8".to_owned();
        let breakdown =
            Breakdown { kind: Kind::Decode, prompt: 7680, kv, steps: 1, floor: 1e-6, replay_seconds: 4e-6, kernels };
        let summary = breakdown.summary();
        let words = "2 launches: 8.0 µs one after another, 6.0 µs without the events' own time; replayed without events \
                     4.0 µs (0.50 of the sum)\n";
        assert_eq!(summary, words);
        assert!(breakdown.table().to_string().contains("1×1×1"));
        assert!(breakdown.title().contains("step behind 7,680, i8"));
    }
}
