//! Device state of all lanes: KV pages, recurrent state and its record, hidden states for MTP, token counts.

use ninfer_core::backend::InferenceBackend;
use ninfer_core::memory::KvFormat;
use ninfer_core::ops::{GdnRecord, GdnState, KvLayer, KvScales};
use ninfer_core::sampling::PARAM_WORDS;
use ninfer_core::segment::PAGE_TOKENS;
use ninfer_core::state::MAX_COLUMNS;
use ninfer_core::view::View;
use ninfer_core::{DType, Result};

use super::activations::matrix;
use crate::config::{Config, LayerKind};

/// Hidden states per slot, by position modulo this: committed ones and the columns of a round in flight.
pub(crate) const RING: usize = KEPT + MAX_COLUMNS;
/// Committed positions whose hidden states are kept, so that MTP can catch up after plain decoding.
pub(crate) const KEPT: usize = 64;

/// State and record of one Gated-DeltaNet layer.
pub(crate) struct GdnCache<B: InferenceBackend> {
    pub(crate) state: GdnState<B>,
    pub(crate) record: GdnRecord<B>,
}

/// Device state of all lanes.
pub(crate) struct Cache<B: InferenceBackend> {
    /// I32 `[slots, pages per lane]`.
    pub(crate) pages: View<B>,
    /// One per full-attention layer.
    pub(crate) kv: Vec<KvLayer<B>>,
    /// The MTP layer's.
    pub(crate) mtp_kv: Option<KvLayer<B>>,
    /// One per Gated-DeltaNet layer.
    pub(crate) gdn: Vec<GdnCache<B>>,
    /// act `[slots · RING + rows, H]`: final-normed states by slot and position, then those of the running pass.
    pub(crate) hidden: View<B>,
    /// U32 `[slots, PARAM_WORDS]`.
    pub(crate) params: View<B>,
    /// U32 `[slots, V]`.
    pub(crate) counts: View<B>,
    /// U32 `[slots, columns]`.
    pub(crate) previous: View<B>,
}

/// Sizes of the device state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheSize {
    pub(crate) slots: usize,
    /// Pages of the pool.
    pub(crate) pages: usize,
    /// Pages a lane can hold.
    pub(crate) lane_pages: usize,
    /// Widest round.
    pub(crate) columns: usize,
    /// Rows of the largest pass.
    pub(crate) rows: usize,
    pub(crate) kv_dtype: DType,
    pub(crate) mtp: bool,
}

impl<B: InferenceBackend> Cache<B> {
    pub(crate) fn alloc(backend: &B, config: &Config, vocab: usize, size: &CacheSize) -> Result<Self> {
        let act = backend.activation_dtype();
        let (a, g, slots) = (&config.attention, &config.gdn, size.slots);
        let pages = matrix(backend, "page table", DType::I32, slots, size.lane_pages)?;
        let kv_layer = |what: &str| -> Result<KvLayer<B>> {
            let rows = size.pages.saturating_mul(a.kv_heads * PAGE_TOKENS);
            let groups = KvFormat::of(size.kv_dtype).map_or(0, |format| format.scale_groups(a.head_dim));
            let scales = || matrix(backend, what, DType::F16, rows, groups);
            Ok(KvLayer {
                keys: matrix(backend, what, size.kv_dtype, rows, a.head_dim)?,
                values: matrix(backend, what, size.kv_dtype, rows, a.head_dim)?,
                scales: if groups > 0 { Some(KvScales { keys: scales()?, values: scales()? }) } else { None },
                pages: pages.clone(),
                heads: a.kv_heads,
            })
        };
        let gdn_layer = || -> Result<GdnCache<B>> {
            let record = slots * 2 * size.columns;
            Ok(GdnCache {
                state: GdnState {
                    window: matrix(backend, "convolution window", act, slots * g.channels(), g.conv_kernel - 1)?,
                    matrix: matrix(
                        backend,
                        "recurrent state",
                        DType::F32,
                        slots * g.value_heads * g.key_dim,
                        g.value_dim,
                    )?,
                },
                record: GdnRecord {
                    width: size.columns,
                    columns: matrix(backend, "recorded columns", act, record, g.channels())?,
                    key_value: matrix(backend, "recorded keys and values", act, record, g.keys() + g.values())?,
                    gates: matrix(backend, "recorded gates", DType::F32, record, 2 * g.value_heads)?,
                },
            })
        };
        let count = |kind| config.layers.iter().filter(|k| **k == kind).count();
        let kv = (0..count(LayerKind::FullAttention)).map(|_| kv_layer("KV pages")).collect::<Result<_>>()?;
        let gdn = (0..count(LayerKind::LinearAttention)).map(|_| gdn_layer()).collect::<Result<_>>()?;
        let mtp_kv = if size.mtp { Some(kv_layer("KV pages of the MTP layer")?) } else { None };
        Ok(Self {
            kv,
            mtp_kv,
            gdn,
            hidden: matrix(backend, "hidden states", act, slots * RING + size.rows, config.hidden)?,
            params: matrix(backend, "sampling parameters", DType::U32, slots, PARAM_WORDS)?,
            counts: matrix(backend, "token counts", DType::U32, slots, vocab)?,
            previous: matrix(backend, "inputs of the last round", DType::U32, slots, size.columns)?,
            pages,
        })
    }
}
