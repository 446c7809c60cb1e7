//! Weights of a layer on the device.

use std::fmt;

use ninfer_core::backend::InferenceBackend;
use ninfer_core::ops::{GdnParams, Norm};
use ninfer_core::view::View;

/// One decoder layer: `x ← x + mixer(N1(x)); x ← x + ffn(N2(x))`.
pub(crate) struct LayerWeights<B: InferenceBackend> {
    pub(crate) input_norm: Norm<B>,
    pub(crate) mixer: Mixer<B>,
    pub(crate) ffn_norm: Norm<B>,
    pub(crate) ffn: FfnWeights<B>,
}

pub(crate) enum Mixer<B: InferenceBackend> {
    Attention(AttentionWeights<B>),
    Gdn(Box<GdnWeights<B>>),
}

pub(crate) struct AttentionWeights<B: InferenceBackend> {
    /// `[Hq · 2D, H]`: per head the query rows, then the gate rows.
    pub(crate) query_gate: B::Weight,
    pub(crate) key: B::Weight,
    pub(crate) value: B::Weight,
    pub(crate) output: B::Weight,
    /// f32 `[2, D]`: query and key gains.
    pub(crate) gains: View<B>,
}

pub(crate) struct GdnWeights<B: InferenceBackend> {
    /// `[C, H]`, in pieces where its rows have different formats, each with the first of its rows.
    pub(crate) qkv: Vec<(usize, B::Weight)>,
    pub(crate) z: B::Weight,
    pub(crate) a: B::Weight,
    pub(crate) b: B::Weight,
    pub(crate) output: B::Weight,
    pub(crate) params: GdnParams<B>,
}

pub(crate) enum FfnWeights<B: InferenceBackend> {
    Dense {
        gate_up: B::Weight,
        down: B::Weight,
    },
    Moe {
        router: B::Weight,
        shared_gate: B::Weight,
        gate_up: B::Weight,
        down: B::Weight,
        shared_gate_up: B::Weight,
        shared_down: B::Weight,
        renormalise: bool,
    },
}

/// The MTP block. Embedding and head are the model's.
pub(crate) struct MtpWeights<B: InferenceBackend> {
    pub(crate) embedding_norm: Norm<B>,
    pub(crate) hidden_norm: Norm<B>,
    pub(crate) fc: B::Weight,
    pub(crate) layer: LayerWeights<B>,
    pub(crate) norm: Norm<B>,
}

impl<B: InferenceBackend> fmt::Debug for LayerWeights<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.mixer {
            Mixer::Attention(_) => "LayerWeights(attention)",
            Mixer::Gdn(_) => "LayerWeights(gdn)",
        })
    }
}
