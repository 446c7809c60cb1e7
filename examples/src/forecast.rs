//! What a model will need and how fast it can be at most, on devices that need not be there.

use ninfer_core::device::{Bandwidth, DeviceInfo, DeviceKind};
use ninfer_core::memory::{KvFormat, MemoryPlan, PlanOptions, binary_size, largest_context, plan};
use ninfer_core::roofline::{BytesMoved, RoundOptions, bytes_per_round, bytes_per_token, ceiling};
use ninfer_core::shape::ModelShape;
use ninfer_core::{DType, tuning};
use serde::Serialize;

use crate::Result;
use crate::formats::Formats;
use crate::table::{Align, Table, grouped};

/// A model and how it is to be used.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Its dimensions.
    pub shape: ModelShape,
    /// Its weights.
    pub formats: Formats,
    /// Positions the model is declared for.
    pub max_positions: usize,
    /// Tokens a sequence may reach.
    pub context: usize,
    /// Sequences at once.
    pub lanes: usize,
    /// Drafts a round; 0 is plain decoding.
    pub drafts: usize,
    /// Storage of the KV cache; `None` is the backend's default.
    pub kv: Option<KvFormat>,
}

/// The same for one device.
#[derive(Clone, Debug, Serialize)]
pub struct Forecast {
    /// Name of the device.
    pub device: String,
    /// Bytes that can be used.
    pub usable_memory: Option<u64>,
    /// Storage of the KV cache.
    pub kv: KvFormat,
    /// Bytes by purpose.
    pub memory: MemoryPlan,
    /// Whether they fit.
    pub fits: Option<bool>,
    /// The longest context that fits, in whole pages; `None` if not even one page does, or where memory is not known.
    pub largest_context: Option<usize>,
    /// Memory bandwidth.
    pub bandwidth: Option<Bandwidth>,
    /// Bytes that a plain decode step of one sequence moves at the full context.
    pub bytes_per_token: BytesMoved,
    /// Tokens a second that the bandwidth allows with plain decoding of one sequence.
    pub tokens_per_second: Option<f64>,
    /// The same with MTP.
    pub mtp: Option<RoundForecast>,
}

/// An MTP round.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RoundForecast {
    /// Drafts of a round.
    pub drafts: usize,
    /// Bytes that a round moves, draft steps included.
    pub bytes_per_round: BytesMoved,
    /// Rounds a second that the bandwidth allows.
    pub rounds_per_second: Option<f64>,
    /// Tokens a second if every draft is accepted.
    pub most_tokens_per_second: Option<f64>,
}

impl Workload {
    /// Plans the memory of a device and works out its ceiling.
    ///
    /// # Errors
    /// [`ninfer_core::Error::OutOfRange`] for sizes that are not legal.
    pub fn forecast(&self, name: &str, device: &DeviceInfo) -> Result<Forecast> {
        let is_cpu = device.kind == DeviceKind::Cpu;
        let (activation, default_kv) = if is_cpu { (DType::F32, KvFormat::F32) } else { (DType::Bf16, KvFormat::Bf16) };
        let kv = self.kv.unwrap_or(default_kv);
        let options = PlanOptions::new(self.context)
            .with_lanes(self.lanes)
            .with_draft_window(self.drafts)
            .with_activation(activation)
            .with_kv(kv)
            .with_prefill_chunk(tuning::prefill_chunk(device, None));
        let format = self.formats.of(&self.shape);
        let memory = plan(&self.shape, format, &options)?;
        let usable = device.usable_memory;
        let longest = |usable| {
            largest_context(&self.shape, format, &options.with_max_context(self.max_positions.max(1)), usable).ok()
        };
        let bandwidth = device.bandwidth;
        let speed = |bytes: BytesMoved| bandwidth.map(|b| ceiling(bytes.total(), b.bytes_per_second));
        let bytes_per_token = bytes_per_token(&self.shape, format, self.context, kv)?;
        let mtp = if self.drafts > 0 && self.shape.mtp {
            let round = RoundOptions::new(&self.shape, self.context, self.drafts).with_kv(kv);
            let bytes_per_round = bytes_per_round(&self.shape, format, &round)?;
            let rounds_per_second = speed(bytes_per_round);
            let most_tokens_per_second = rounds_per_second.map(|r| r * (self.drafts + 1) as f64);
            Some(RoundForecast { drafts: self.drafts, bytes_per_round, rounds_per_second, most_tokens_per_second })
        } else {
            None
        };
        Ok(Forecast {
            device: name.to_owned(),
            usable_memory: usable,
            kv,
            memory,
            fits: usable.map(|bytes| memory.fits(bytes)),
            largest_context: usable.and_then(longest),
            bandwidth,
            bytes_per_token,
            tokens_per_second: speed(bytes_per_token),
            mtp,
        })
    }
}

/// Forecasts with different memory plans, in the order of their first device.
fn plans(forecasts: &[Forecast]) -> Vec<&Forecast> {
    let mut distinct: Vec<&Forecast> = Vec::new();
    for f in forecasts {
        if !distinct.iter().any(|other| same_plan(other, f)) {
            distinct.push(f);
        }
    }
    distinct
}

fn same_plan(a: &Forecast, b: &Forecast) -> bool {
    (a.memory, a.kv) == (b.memory, b.kv)
}

/// The letter of a plan in tables.
fn letter(index: usize) -> String {
    u8::try_from(index).ok().and_then(|i| b'A'.checked_add(i)).map_or('?', char::from).to_string()
}

/// Memory by purpose and bytes moved: a column for each different plan.
#[must_use]
pub fn memory_table(forecasts: &[Forecast]) -> Table {
    let plans = plans(forecasts);
    let heads: Vec<String> = (0..plans.len()).map(|i| format!("plan {}", letter(i))).collect();
    let columns = heads.iter().map(|head| (head.as_str(), Align::Right));
    let mut table = Table::new(&std::iter::once(("memory", Align::Left)).chain(columns).collect::<Vec<_>>());
    let mut row = |name: &str, cell: &dyn Fn(&Forecast) -> String| {
        table.row(std::iter::once(name.to_owned()).chain(plans.iter().map(|f| cell(f))));
    };
    row("format of the KV cache", &|f| f.kv.to_string());
    for (i, (name, _)) in MemoryPlan::default().rows().iter().enumerate() {
        row(name, &|f| f.memory.rows().get(i).map_or_else(String::new, |&(_, bytes)| binary_size(bytes)));
    }
    row("total", &|f| binary_size(f.memory.total));
    row("", &|_| String::new());
    row("moved per token", &|f| binary_size(f.bytes_per_token.total()));
    row("  weights", &|f| binary_size(f.bytes_per_token.weights));
    row("  KV cache", &|f| binary_size(f.bytes_per_token.kv));
    row("  recurrent state", &|f| binary_size(f.bytes_per_token.state));
    if plans.iter().any(|f| f.mtp.is_some()) {
        let total = |f: &Forecast| f.mtp.map_or_else(String::new, |mtp| binary_size(mtp.bytes_per_round.total()));
        row("moved per MTP round", &total);
    }
    table
}

/// One line a device.
#[must_use]
pub fn device_table(forecasts: &[Forecast]) -> Table {
    let (left, right) = (Align::Left, Align::Right);
    let mut table = Table::new(&[
        ("device", left),
        ("plan", left),
        ("needs", right),
        ("usable", right),
        ("fits", left),
        ("longest context", right),
        ("bandwidth", right),
        ("tok/s", right),
        ("MTP rounds/s", right),
        ("tok/s, all accepted", right),
    ]);
    let plans = plans(forecasts);
    let number = |value: Option<f64>| match value {
        None => "?".to_owned(),
        Some(v) if v < 1000.0 => format!("{v:.1}"),
        Some(v) => grouped(v as u64),
    };
    for f in forecasts {
        table.row([
            f.device.clone(),
            plans.iter().position(|plan| same_plan(plan, f)).map_or_else(String::new, letter),
            binary_size(f.memory.total),
            f.usable_memory.map_or_else(|| "?".to_owned(), binary_size),
            f.fits.map_or("?", |fits| if fits { "yes" } else { "no" }).to_owned(),
            f.largest_context.map_or_else(|| "none".to_owned(), |tokens| grouped(tokens as u64)),
            f.bandwidth.map_or_else(|| "?".to_owned(), |b| format!("{:.0} GB/s", b.bytes_per_second / 1e9)),
            number(f.tokens_per_second),
            f.mtp.map_or_else(|| "-".to_owned(), |mtp| number(mtp.rounds_per_second)),
            f.mtp.map_or_else(|| "-".to_owned(), |mtp| number(mtp.most_tokens_per_second)),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use ninfer_core::{known, shape};

    use super::*;

    fn workload(context: usize, drafts: usize) -> Workload {
        let shape = shape::published("27b").unwrap();
        let formats = Formats::of_release(&"nvfp4".parse().unwrap());
        Workload { shape, formats, max_positions: 262_144, context, lanes: 1, drafts, kv: None }
    }

    #[test]
    fn a_model_fits_where_it_fits() {
        let gb10 = known::profile("gb10").unwrap().device_info();
        let card = known::profile("rtx3080").unwrap().device_info();
        let large = workload(4096, 3).forecast("gb10", &gb10).unwrap();
        assert_eq!((large.fits, large.largest_context), (Some(true), Some(262_144)));
        let small = workload(4096, 3).forecast("rtx3080", &card).unwrap();
        assert_eq!((small.fits, small.largest_context), (Some(false), None));
        assert_eq!(large.memory.weights, small.memory.weights);
    }

    #[test]
    fn ceilings_are_bandwidth_over_bytes() {
        let gb10 = known::profile("gb10").unwrap().device_info();
        let f = workload(4096, 3).forecast("gb10", &gb10).unwrap();
        let expected = 273e9 / f.bytes_per_token.total() as f64;
        assert!((f.tokens_per_second.unwrap() - expected).abs() < 1e-9);
        let mtp = f.mtp.unwrap();
        assert!((mtp.most_tokens_per_second.unwrap() - 4.0 * mtp.rounds_per_second.unwrap()).abs() < 1e-9);
        assert!(workload(4096, 0).forecast("gb10", &gb10).unwrap().mtp.is_none());
        let tables = [f.clone(), workload(4096, 0).forecast("plain", &gb10).unwrap()];
        let (devices, memory) = (device_table(&tables).to_string(), memory_table(&tables).to_string());
        assert!(devices.contains("273 GB/s") && memory.contains("plan B") && !memory.contains("plan C"));
    }
}
