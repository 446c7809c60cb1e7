//! Sessions and what is timed in them.

use std::time::Instant;

use ninfer_benches::Random;
use ninfer_core::model::{CausalModel, LaneOptions, PrefillEnd, RoundRow};
use ninfer_core::state::Committed;
use ninfer_examples::{Failure, Result};
use ninfer_kernels::cuda::{Cuda, ReplayTime, Timing};
use ninfer_models::{Qwen35, Session, SessionOptions};

use crate::arguments::Kv;
use crate::breakdown::{Launch, Resources};
use crate::report::median;

/// Rounds before the measured ones: the first is recorded.
const WARM_UP: usize = 3;
/// Rounds that are timed on the device as well.
const TIMED: usize = 32;

type Lane = Committed<<Session<Cuda> as CausalModel>::Lane>;

/// What the session of a measurement is for.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    pub prompt: usize,
    pub kv: Kv,
    /// Rows of a prompt chunk.
    pub chunk: usize,
    /// Rounds that are measured.
    pub new: usize,
    pub drafts: usize,
    pub lanes: usize,
}

impl Setting {
    /// Positions of a lane: each round moves it by one.
    fn context(&self) -> usize {
        self.prompt + self.new + TIMED + 3 * WARM_UP + self.drafts + 64
    }

    pub fn session(&self, model: &Qwen35<Cuda>) -> Result<Session<Cuda>> {
        let options = SessionOptions::new(self.context())
            .with_lanes(self.lanes)
            .with_max_drafts(self.drafts)
            .with_prefill_chunk(self.chunk)
            .with_kv_dtype(self.kv.dtype())
            .with_mtp(self.drafts > 0);
        Ok(model.session(&options)?)
    }
}

/// A sequence and the inputs of its next round.
pub struct Sequence {
    lane: Lane,
    anchor: u32,
    drafts: Vec<u32>,
}

impl Sequence {
    /// Tokens in its cache.
    pub fn position(&self) -> usize {
        self.lane.position()
    }
}

/// Times of rounds.
#[derive(Clone, Debug, Default)]
pub struct Rounds {
    /// Median on the host's clock.
    pub seconds: f64,
    /// Median of the recorded step on the device.
    pub device_seconds: f64,
    /// Kernels, copies and fills of it.
    pub launches: usize,
}

fn no_token() -> Failure {
    Failure::usage("a round emitted no token", "check the session")
}

/// Fills the lane of a new sequence with a random prompt; the time is that of the whole prompt and its first token.
pub fn prefill(session: &mut Session<Cuda>, setting: &Setting, seed: u64, drafts: usize) -> Result<(Sequence, f64)> {
    let vocab = u32::try_from(session.limits().vocab).unwrap_or(u32::MAX);
    let mut random = Random::new(seed);
    let prompt: Vec<u32> = (0..setting.prompt).map(|_| random.below(vocab)).collect();
    let mut lane = session.open_lane(&LaneOptions::new(setting.context()))?;
    let start = Instant::now();
    let first = session.prefill(&mut lane, &prompt, PrefillEnd::Choose { drafts }, None)?.ok_or_else(no_token)?;
    let seconds = start.elapsed().as_secs_f64();
    let anchor = first.tokens.last().copied().ok_or_else(no_token)?;
    Ok((Sequence { lane, anchor, drafts: first.drafts.to_vec() }, seconds))
}

/// One round of all sequences, each of which commits its anchor only; the time on the host's clock.
fn round(session: &mut Session<Cuda>, sequences: &mut [Sequence], next: usize) -> Result<f64> {
    let inputs: Vec<(u32, Vec<u32>)> = sequences.iter().map(|s| (s.anchor, s.drafts.clone())).collect();
    let rows: Vec<RoundRow<'_>> = inputs
        .iter()
        .map(|(anchor, drafts)| RoundRow::new(*anchor).with_drafts(drafts).with_next_drafts(next))
        .collect();
    let counts = vec![1; sequences.len()];
    let mut lanes: Vec<&mut Lane> = sequences.iter_mut().map(|s| &mut s.lane).collect();
    let start = Instant::now();
    let outcomes = session.verify(&mut lanes, &rows)?.commit(&counts)?;
    let seconds = start.elapsed().as_secs_f64();
    for (sequence, outcome) in sequences.iter_mut().zip(&outcomes) {
        sequence.anchor = outcome.tokens.first().copied().ok_or_else(no_token)?;
        sequence.drafts = outcome.drafts.to_vec();
    }
    Ok(seconds)
}

/// Times rounds on the host's clock first, and then some on the device, so that events do not disturb the former.
pub fn rounds(
    gpu: &Cuda,
    session: &mut Session<Cuda>,
    sequences: &mut [Sequence],
    count: usize,
    next: usize,
) -> Result<Rounds> {
    for _ in 0..WARM_UP {
        round(session, sequences, next)?;
    }
    let mut wall = Vec::with_capacity(count);
    for _ in 0..count {
        wall.push(round(session, sequences, next)?);
    }
    let replays =
        timed(gpu, Timing::Replays, || (0..TIMED).try_for_each(|_| round(session, sequences, next).map(drop)))?;
    let device: Vec<f64> = replays.iter().map(|r| r.seconds).collect();
    Ok(Rounds {
        seconds: median(&wall).ok_or_else(no_token)?,
        device_seconds: median(&device).ok_or_else(no_token)?,
        launches: replays.last().map_or(0, |r| r.launches),
    })
}

/// What the device times while something runs.
fn timed(gpu: &Cuda, timing: Timing, work: impl FnOnce() -> Result<()>) -> Result<Vec<ReplayTime>> {
    gpu.take_times()?;
    gpu.set_timing(timing);
    let worked = work();
    gpu.set_timing(Timing::Off);
    let times = gpu.take_times()?;
    worked.map(|()| times)
}

/// Launches of some steps with their times, and the time of two events with nothing between them. The session is one of
/// its own, since its rounds are recorded with events.
pub fn kernels(gpu: &Cuda, model: &Qwen35<Cuda>, setting: &Setting, drafts: usize) -> Result<(Vec<Vec<Launch>>, f64)> {
    let mut session = setting.session(model)?;
    let (sequence, _) = prefill(&mut session, setting, 1, drafts)?;
    let mut sequences = [sequence];
    let times = timed(gpu, Timing::Kernels, || {
        (0..WARM_UP + TIMED).try_for_each(|_| round(&mut session, &mut sequences, drafts).map(drop))
    })?;
    let times: Vec<_> = times.into_iter().skip(WARM_UP).collect();
    let floors: Vec<f64> = times.iter().map(|t| t.floor).collect();
    let steps = times.iter().map(|t| {
        let launches = t.kernels.iter().map(|k| Launch {
            name: k.name,
            grid: k.grid,
            block: k.block,
            shared_bytes: k.shared_bytes,
            seconds: k.seconds,
        });
        launches.collect()
    });
    Ok((steps.collect(), median(&floors).unwrap_or_default()))
}

/// Registers and local memory of the kernels used so far.
pub fn resources(gpu: &Cuda) -> impl Fn(&str) -> Resources + use<> {
    let report = gpu.kernel_report();
    move |name| {
        let found = report.iter().find(|k| k.name == name);
        found.map_or_else(Resources::default, |k| Resources { registers: k.registers, local_bytes: k.local_bytes })
    }
}

/// Mean tokens that a round of `drafts` drafts counts, when a coin of probability `acceptance` is thrown for each draft
/// until the first that fails.
pub fn tokens_per_round(drafts: usize, acceptance: f64, rounds: usize) -> f64 {
    let mut random = Random::new(1);
    let mut tokens = 0;
    for _ in 0..rounds {
        let coin = || f64::from(random.uniform()) * 0.5 + 0.5 < acceptance;
        tokens += 1 + std::iter::repeat_with(coin).take(drafts).take_while(|&accepted| accepted).count();
    }
    tokens as f64 / rounds.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_coin_counts_as_many_drafts_as_it_should() {
        assert_eq!(
            [tokens_per_round(3, 0.0, 100), tokens_per_round(3, 1.0, 100), tokens_per_round(0, 0.5, 9)],
            [1., 4., 1.]
        );
        // 1 + p + p² + p³; the deviation of a mean of 10,000 rounds is about 0.012.
        assert!((tokens_per_round(3, 0.7, 10_000) - 2.533).abs() < 0.06);
    }

    #[test]
    fn a_lane_has_room_for_all_rounds() {
        let setting = Setting { prompt: 7680, kv: Kv::I8, chunk: 1024, new: 256, drafts: 3, lanes: 1 };
        assert!(setting.context() > 7680 + WARM_UP + 256 + TIMED + 4);
    }
}
