//! A toy language model with everything a real one has to keep in order: lanes, rounds that can be dropped, counts, an MTP
//! cache that can fall behind, and a clock that only it moves.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ninfer_core::model::{CausalModel, LaneOptions, Limits, LogitSink, PrefillEnd, RoundRow};
use ninfer_core::sampling::{ChooseScratch, PROMPT_BIT, Purpose, SamplingParams, choose, uniform};
use ninfer_core::state::{Committed, LaneState, Outcome, Round, Snapshot, TokenRow};
use ninfer_core::{Error, Result};
use ninfer_spec::Clock;

pub const VOCAB: usize = 17;
pub const TOKENS: usize = 13;

/// Nanoseconds that only the model moves.
#[derive(Debug, Default)]
pub struct ToyClock(AtomicU64);

impl ToyClock {
    pub fn pass(&self, seconds: f64) {
        self.0.fetch_add((seconds * 1e9) as u64, Ordering::Relaxed);
    }
}

impl Clock for ToyClock {
    fn seconds(&self) -> f64 {
        self.0.load(Ordering::Relaxed) as f64 * 1e-9
    }
}

#[derive(Debug)]
pub struct ToyLane {
    /// Committed inputs; true for those of rounds.
    pub inputs: Vec<(u32, bool)>,
    /// Columns recorded by the last round.
    recorded: Vec<u32>,
    sampling: SamplingParams,
    capacity: usize,
    mtp_rows: usize,
    /// Lanes that are open.
    open: Arc<AtomicU64>,
}

impl Drop for ToyLane {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }
}

impl LaneState for ToyLane {
    fn advance(&mut self, inputs: usize, realigned: usize) {
        if realigned > 0 {
            self.mtp_rows = self.inputs.len() + realigned;
        }
        let columns = std::mem::take(&mut self.recorded);
        self.inputs.extend(columns[..inputs].iter().map(|&t| (t, true)));
    }

    fn position(&self) -> usize {
        self.inputs.len()
    }
}

impl ToyLane {
    pub fn tokens(&self) -> Vec<u32> {
        self.inputs.iter().map(|i| i.0).collect()
    }
}

pub struct ToyModel {
    pub limits: Limits,
    pub clock: Arc<ToyClock>,
    /// Seconds of a plain round, and per draft verified and made.
    pub seconds: (f64, f64, f64),
    /// Chance that an MTP draft is the target's most likely token.
    pub accuracy: f64,
    /// A token that the model repeats for ever once it is in the text.
    pub sticky: Option<u32>,
    /// Refuses MTP in rounds behind this position.
    pub mtp_until: usize,
    /// Refuses MTP after a prefill.
    pub mtp_prefill: bool,
    /// Overwrites outcomes, for tests of lies.
    pub lie: Option<fn(&mut Outcome)>,
    /// Prompt chunks so far: first position and length.
    pub chunks: Vec<(usize, usize)>,
    /// Drafts of each round.
    pub drafted: Vec<usize>,
    open: Arc<AtomicU64>,
}

impl ToyModel {
    pub fn new() -> Self {
        Self {
            limits: Limits::new(VOCAB, 4096, 2, 15).with_mtp(true).with_token_limit(TOKENS),
            clock: Arc::default(),
            seconds: (0.01, 0.001, 0.0005),
            accuracy: 0.7,
            sticky: None,
            mtp_until: usize::MAX,
            mtp_prefill: true,
            lie: None,
            chunks: Vec::new(),
            drafted: Vec::new(),
            open: Arc::default(),
        }
    }

    pub fn open_lanes(&self) -> u64 {
        self.open.load(Ordering::Relaxed)
    }

    /// Logits behind a text: a hash of its last two tokens and of its length by sixteens, so that greedy text is no loop.
    pub fn logits(&self, text: &[u32]) -> Vec<f32> {
        let mut logits = logits(text);
        if let Some(sticky) = self.sticky.filter(|s| text.contains(s)) {
            logits[sticky as usize] = 50.0;
        }
        logits
    }

    /// What the MTP block proposes behind a text: the most likely token, or on purpose another one.
    fn guess(&self, text: &[u32]) -> u32 {
        let best = argmax(&self.logits(text)[..TOKENS]);
        let seed = text.iter().rev().take(4).fold(text.len() as u64, |h, &t| h * 31 + u64::from(t));
        if uniform(seed, 5, Purpose::Draft, 0) < self.accuracy { best } else { (best + 1) % TOKENS as u32 }
    }

    fn chain(&self, mut text: Vec<u32>, n: usize) -> TokenRow {
        let from = text.len();
        for _ in 0..n {
            let draft = self.guess(&text);
            text.push(draft);
        }
        TokenRow::new(&text[from..])
    }

    fn pick(&self, lane: &ToyLane, columns: &[u32]) -> Result<u32> {
        let mut text = lane.tokens();
        text.extend(columns);
        let count = |id: u32| {
            let committed = lane.inputs.iter().filter(|i| i.0 == id);
            let word = committed.fold(0, |w, &(_, generated)| if generated { w + 1 } else { w | PROMPT_BIT });
            word + columns.iter().filter(|&&t| t == id).count() as u32
        };
        let position = text.len() as u64;
        choose(&self.logits(&text), TOKENS, &lane.sampling, &count, position, &mut ChooseScratch::new())
            .ok_or(Error::NonFinite { what: "logits", position: text.len() })
    }

    fn round(&self, lane: &ToyLane, row: &RoundRow<'_>) -> Result<Outcome> {
        let mut columns = vec![row.anchor];
        columns.extend(row.drafts);
        let position = lane.inputs.len();
        if position + columns.len() > lane.capacity {
            return Err(Error::ContextOverflow { requested: position + columns.len(), limit: lane.capacity });
        }
        if row.next_drafts > 0 {
            let behind = position - lane.mtp_rows;
            if !self.limits.mtp || behind > 64 || position > self.mtp_until {
                return Err(Error::MtpUnavailable { reason: format!("{behind} rows behind") });
            }
        }
        let mut tokens = Vec::new();
        let mut logits = Vec::new();
        for i in 0..columns.len() {
            tokens.push(self.pick(lane, &columns[..=i])?);
            let text: Vec<u32> = lane.tokens().iter().chain(&columns[..=i]).copied().collect();
            logits.extend(self.logits(&text));
        }
        let accepted = row.drafts.iter().zip(&tokens).take_while(|(d, t)| d == t).count();
        let mut text = lane.tokens();
        text.push(row.anchor);
        text.extend(&tokens[..=accepted]);
        Ok(Outcome {
            accepted,
            tokens: TokenRow::new(&tokens[..=accepted]),
            drafts: self.chain(text, row.next_drafts),
            columns: columns.len(),
            realigned: if row.next_drafts > 0 { accepted + 1 } else { 0 },
            logits: row.logits.then_some(logits),
        })
    }
}

pub fn logits(text: &[u32]) -> Vec<f32> {
    let key = text.iter().rev().take(2).fold((text.len() / 16) as u64, |h, &t| h * 64 + u64::from(t) + 1);
    (0..VOCAB as u32).map(|v| (uniform(key, 1, Purpose::Residual, v) * 5.0) as f32).collect()
}

pub fn argmax(logits: &[f32]) -> u32 {
    let best = (0..logits.len()).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
    best.unwrap() as u32
}

impl CausalModel for ToyModel {
    type Lane = ToyLane;
    type Image = Vec<(u32, bool)>;

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn open_lane(&mut self, options: &LaneOptions) -> Result<Committed<ToyLane>> {
        if options.capacity > self.limits.max_context {
            return Err(Error::ContextOverflow { requested: options.capacity, limit: self.limits.max_context });
        }
        if self.open_lanes() as usize >= self.limits.lanes {
            return Err(Error::Exhausted { what: "slot", capacity: self.limits.lanes });
        }
        self.open.fetch_add(1, Ordering::Relaxed);
        Ok(Committed::accept(ToyLane {
            inputs: Vec::new(),
            recorded: Vec::new(),
            sampling: options.sampling,
            capacity: options.capacity,
            mtp_rows: 0,
            open: self.open.clone(),
        }))
    }

    fn set_sampling(&mut self, lane: &mut Committed<ToyLane>, sampling: &SamplingParams) -> Result<()> {
        lane.get_mut().sampling = *sampling;
        Ok(())
    }

    fn prefill(
        &mut self,
        lane: &mut Committed<ToyLane>,
        tokens: &[u32],
        end: PrefillEnd,
        _logits: Option<LogitSink<'_>>,
    ) -> Result<Option<Outcome>> {
        let position = lane.position();
        let lane = lane.get_mut();
        if tokens.is_empty() {
            return Err(Error::OutOfRange { what: "prompt length", got: "0".into(), legal: "1 or more".into() });
        }
        if position + tokens.len() > lane.capacity {
            return Err(Error::ContextOverflow { requested: position + tokens.len(), limit: lane.capacity });
        }
        self.chunks.push((position, tokens.len()));
        self.clock.pass(0.001 * tokens.len() as f64);
        lane.inputs.extend(tokens.iter().map(|&t| (t, false)));
        lane.mtp_rows = lane.inputs.len();
        let PrefillEnd::Choose { drafts } = end else { return Ok(None) };
        if drafts > 0 && !(self.limits.mtp && self.mtp_prefill) {
            return Err(Error::MtpUnavailable { reason: "refused".into() });
        }
        let token = self.pick(lane, &[])?;
        let mut text = lane.tokens();
        text.push(token);
        let drafts = self.chain(text, drafts);
        Ok(Some(Outcome { tokens: TokenRow::new(&[token]), drafts, columns: 0, ..Outcome::default() }))
    }

    fn verify<'r, 'l>(
        &mut self,
        lanes: &'r mut [&'l mut Committed<ToyLane>],
        rows: &[RoundRow<'_>],
    ) -> Result<Round<'r, 'l, ToyLane>> {
        let mut outcomes = Vec::new();
        for (lane, row) in lanes.iter().zip(rows) {
            outcomes.push(self.round(lane.get(), row)?);
        }
        for (lane, row) in lanes.iter_mut().zip(rows) {
            let recorded = &mut lane.get_mut().recorded;
            *recorded = vec![row.anchor];
            recorded.extend(row.drafts);
            self.drafted.push(row.drafts.len());
            let (plain, verify, make) = self.seconds;
            self.clock.pass(plain + verify * row.drafts.len() as f64 + make * row.next_drafts as f64);
        }
        if let Some(lie) = self.lie {
            outcomes.iter_mut().for_each(lie);
        }
        Round::open(lanes, outcomes)
    }

    fn snapshot(&mut self, lane: &mut Committed<ToyLane>) -> Result<Snapshot<Self::Image>> {
        lane.snapshot(|lane| Ok(lane.inputs.clone()))
    }

    fn restore(&mut self, image: &Snapshot<Self::Image>, options: &LaneOptions) -> Result<Committed<ToyLane>> {
        let mut lane = self.open_lane(options)?;
        lane.get_mut().inputs.clone_from(image.image());
        lane.get_mut().mtp_rows = image.image().len();
        Ok(lane)
    }
}
