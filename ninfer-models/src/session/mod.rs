//! Sessions: lanes over paged KV and recurrent state, prompt chunks, and rounds with one synchronisation.

pub(crate) mod activations;
pub(crate) mod cache;
mod image;
mod ingress;
mod lane;
mod options;
mod prefill;
mod round;
mod tail;
#[cfg(test)]
mod tests;
mod trace;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use ninfer_core::backend::{InferenceBackend, Reservation};
use ninfer_core::model::{CausalModel, LaneOptions, Limits, LogitSink, MtpModel, PrefillEnd, RoundRow};
use ninfer_core::ops::{Count, GdnFold};
use ninfer_core::sampling::SamplingParams;
use ninfer_core::segment::{Batch, MAX_STEP_ROWS, PAGE_TOKENS, Profile, Segment};
use ninfer_core::state::{Committed, Outcome, Round, Snapshot};
use ninfer_core::view::View;
use ninfer_core::{DType, Error, Result};

pub use image::LaneImage;
pub use lane::Lane;
pub use options::SessionOptions;
pub use trace::Trace;

use activations::{Rows, matrix};
use cache::{Cache, CacheSize};
use ingress::Ingress;
use lane::Pools;
use round::RoundKey;
use tail::TailBuffers;

use crate::qwen35::{Mixer, Qwen35};

/// Rows of a block of logits that is copied to the host at a time.
const LOGIT_ROWS: usize = 64;

/// An open model: device state for some lanes and everything a pass needs, allocated once.
///
/// Implements [`CausalModel`] and [`MtpModel`]. One thread owns it; several sessions may share a [`Qwen35`].
pub struct Session<B: InferenceBackend> {
    model: Qwen35<B>,
    queue: B::Queue,
    limits: Limits,
    options: SessionOptions,
    columns: usize,
    pools: Arc<Pools>,
    cache: Cache<B>,
    rows: Rows<B>,
    tail: TailBuffers<B>,
    ingress: Ingress<B>,
    recorded: HashMap<RoundKey, B::Recorded>,
    host: Vec<u8>,
    trace: Option<trace::TraceBuffers<B>>,
}

impl<B: InferenceBackend> fmt::Debug for Session<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("model", &self.model).field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl<B: InferenceBackend> Session<B> {
    pub(crate) fn open(model: Qwen35<B>, options: &SessionOptions) -> Result<Self, crate::Error> {
        options.check()?;
        let backend = model.backend().clone();
        let config = model.config();
        let columns = options.max_drafts + 1;
        let mtp = options.mtp && model.has_mtp();
        let kv_dtype = options.kv_dtype.or(backend.kv_dtypes().first().copied()).unwrap_or(DType::F32);
        if !backend.kv_dtypes().contains(&kv_dtype) {
            let names: Vec<_> = backend.kv_dtypes().iter().map(|d| d.name()).collect();
            return Err(crate::Error::Core(Error::Unsupported {
                op: format!("KV cache in {kv_dtype}"),
                need: names.join(" or "),
                have: kv_dtype.to_string(),
            }));
        }
        // Drafts may be chained behind the last position that is committed.
        let spare = 2 * columns;
        let lane_pages = (options.max_context + spare).div_ceil(PAGE_TOKENS);
        let pages = match options.kv_tokens {
            Some(tokens) => (tokens + options.lanes * spare).div_ceil(PAGE_TOKENS),
            None => options.lanes * lane_pages,
        };
        let step_rows = (options.lanes * columns).clamp(LOGIT_ROWS, MAX_STEP_ROWS);
        let rows = step_rows.max(options.prefill_chunk.min(options.max_context));
        let size = CacheSize { slots: options.lanes, pages, lane_pages, columns, rows, kv_dtype, mtp };
        let mut queue = backend.queue()?;
        backend.reserve(
            &mut queue,
            &Reservation {
                shape: config.shape(),
                step_rows,
                prefill_rows: rows,
                segments: options.lanes,
                max_context: options.max_context + spare,
            },
        )?;
        let cache = Cache::alloc(&backend, config, model.vocab(), &size)?;
        let activations = Rows::alloc(&backend, config, rows)?;
        let tail = TailBuffers::alloc(&backend, &mut queue, config, model.vocab(), &size, step_rows)?;
        // Tables, ids and three index lists of the largest pass.
        let ingress = Ingress::alloc(&backend, 8 * (2 + options.lanes.max(rows.div_ceil(LOGIT_ROWS) + 1)) + 4 * rows)?;
        let limits = Limits::new(model.vocab(), options.max_context, options.lanes, options.max_drafts)
            .with_mtp(mtp)
            .with_token_limit(options.token_limit.unwrap_or(model.vocab()));
        Ok(Self {
            queue,
            limits,
            columns,
            pools: Pools::new(options.lanes, pages),
            cache,
            rows: activations,
            tail,
            ingress,
            recorded: HashMap::new(),
            host: Vec::new(),
            trace: None,
            options: options.clone(),
            model,
        })
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> &Qwen35<B> {
        &self.model
    }

    /// The options it was opened with.
    #[must_use]
    pub fn options(&self) -> &SessionOptions {
        &self.options
    }

    /// Positions a lane reserves beyond its capacity for drafts.
    fn spare(&self) -> usize {
        2 * self.columns
    }

    fn check_ids(&self, ids: &[u32]) -> Result<()> {
        match ids.iter().find(|&&id| id as usize >= self.limits.vocab) {
            None => Ok(()),
            Some(id) => Err(Error::OutOfRange {
                what: "token id",
                got: id.to_string(),
                legal: format!("0 to {}", self.limits.vocab - 1),
            }),
        }
    }

    /// Fails for a lane that another session opened: its slot and pages mean something else here.
    fn check_owner(&self, lane: &Lane) -> Result<()> {
        if lane.reserved.belongs_to(&self.pools) {
            return Ok(());
        }
        Err(Error::Corrupt { reason: "the lane belongs to another session".to_owned() })
    }

    /// Folds what the last round recorded, so that the state in memory belongs to the lane's position.
    fn fold(&mut self, lane: &mut Lane) -> Result<()> {
        if lane.fold == 0 {
            return Ok(());
        }
        self.ingress.clear();
        let segment = Segment {
            slot: lane.reserved.slot,
            start: lane.position as u32,
            row: 0,
            len: 0,
            fold: lane.fold as u32,
            bank: 1 - lane.bank,
        };
        let table = self.ingress.table(std::iter::once(segment))?;
        // Token counts move with the state: one row that holds no token, so that the round before is counted and none behind it.
        let count_table = self.ingress.table(std::iter::once(Segment { len: 1, ..segment }))?;
        let ids = self.ingress.ids(std::iter::once(u32::MAX))?;
        self.ingress.send(self.model.backend(), &mut self.queue)?;
        let batch = Batch::new(Profile::Step, 1, table)?;
        let count = Count {
            batch: Batch::new(Profile::Step, 1, count_table)?,
            ids,
            previous: self.cache.previous.clone(),
            counts: self.cache.counts.clone(),
        };
        let (model, cache) = (&self.model, &self.cache);
        lane.broken = true;
        model.backend().run(&mut self.queue, |rec| {
            if lane.sampled {
                rec.count(count)?;
            }
            let layers = model.layer_weights().iter().filter_map(|l| match &l.mixer {
                Mixer::Gdn(w) => Some(w),
                Mixer::Attention(_) => None,
            });
            for (w, cache) in layers.zip(&cache.gdn) {
                rec.gdn_fold(GdnFold {
                    batch: batch.clone(),
                    params: w.params.clone(),
                    state: cache.state.clone(),
                    record: cache.record.clone(),
                })?;
            }
            Ok(())
        })?;
        lane.broken = false;
        lane.fold = 0;
        Ok(())
    }

    fn upload_row<T: bytemuck::NoUninit>(&mut self, view: &View<B>, row: usize, values: &[T]) -> Result<()> {
        let row = view.row_range(row..row + 1)?.col_range(0..values.len())?;
        self.model.backend().upload(&mut self.queue, &row, bytemuck::cast_slice(values))
    }
}

impl<B: InferenceBackend> CausalModel for Session<B> {
    type Lane = Lane;
    type Image = LaneImage;

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn open_lane(&mut self, options: &LaneOptions) -> Result<Committed<Lane>> {
        if options.capacity == 0 || options.capacity > self.limits.max_context {
            return Err(Error::ContextOverflow { requested: options.capacity, limit: self.limits.max_context });
        }
        let reserved = self.pools.reserve(options.capacity + self.spare())?;
        let pages: Vec<i32> = reserved.pages.iter().map(|p| p.cast_signed()).collect();
        let table = self.cache.pages.clone();
        self.upload_row(&table, reserved.slot as usize, &pages)?;
        let mut lane = Committed::accept(Lane::new(reserved, options.capacity));
        self.set_sampling(&mut lane, &options.sampling)?;
        Ok(lane)
    }

    fn set_sampling(&mut self, lane: &mut Committed<Lane>, sampling: &SamplingParams) -> Result<()> {
        self.check_owner(lane.get())?;
        sampling.validate()?;
        let sampled = !sampling.is_greedy() || sampling.has_penalties();
        if sampled != lane.get().sampled {
            // Only rounds of sampled lanes leave their inputs to be counted by the next one.
            self.fold(lane.get_mut())?;
        }
        let params = self.cache.params.clone();
        self.upload_row(&params, lane.get().reserved.slot as usize, &sampling.to_words())?;
        lane.get_mut().sampled = sampled;
        Ok(())
    }

    fn prefill(
        &mut self,
        lane: &mut Committed<Lane>,
        tokens: &[u32],
        end: PrefillEnd,
        logits: Option<LogitSink<'_>>,
    ) -> Result<Option<Outcome>> {
        self.prefill_tokens(lane.get_mut(), tokens, end, logits)
    }

    fn verify<'r, 'l>(
        &mut self,
        lanes: &'r mut [&'l mut Committed<Lane>],
        rows: &[RoundRow<'_>],
    ) -> Result<Round<'r, 'l, Lane>> {
        let outcomes = self.run_round(lanes, rows)?;
        Round::open(lanes, outcomes)
    }

    fn snapshot(&mut self, lane: &mut Committed<Lane>) -> Result<Snapshot<LaneImage>> {
        self.check_owner(lane.get())?;
        self.fold(lane.get_mut())?;
        lane.snapshot(|lane| self.take_image(lane))
    }

    fn restore(&mut self, image: &Snapshot<LaneImage>, options: &LaneOptions) -> Result<Committed<Lane>> {
        let mut lane = self.open_lane(options)?;
        self.put_image(lane.get_mut(), image.image())?;
        Ok(lane)
    }
}

impl<B: InferenceBackend> MtpModel for Session<B> {
    fn mtp_ready(&self, lane: &Committed<Lane>) -> std::result::Result<(), String> {
        self.mtp_lag(lane.get()).map(|_| ())
    }
}

/// A view of words for results that go to the host.
fn words<B: InferenceBackend>(backend: &B, what: &str, dtype: DType, rows: usize, cols: usize) -> Result<View<B>> {
    matrix(backend, what, dtype, rows.max(1), cols)
}
