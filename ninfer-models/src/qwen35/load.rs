//! Bringing weights to a device, one matrix at a time.

use ninfer_core::backend::{DeviceWeight, InferenceBackend, Synthetic};
use ninfer_core::ops::{GdnParams, Norm};
use ninfer_core::view::View;
use ninfer_core::{DType, Error as CoreError};
use ninfer_quant::{PackedMatrix, Recipe, TensorRole};

use super::{AttentionWeights, FfnWeights, GdnWeights, Inner, LayerWeights, Mixer, MtpWeights};
use crate::config::{Config, Ffn, LayerKind};
use crate::rope::inverse_frequencies;
use crate::weights::{ExpertPart, LayerRef, MtpState, VectorRole, WeightTable};
use crate::{Error, Result};

/// Where the weights of a model come from: a checkpoint, or memory.
///
/// Shapes are those the configuration implies; the loader checks them again when it builds the graph.
pub trait WeightSource {
    /// The configuration.
    fn config(&self) -> &Config;

    /// Whether there is a complete MTP block.
    fn has_mtp(&self) -> bool;

    /// Whether the head is a matrix of its own; otherwise the embedding is the head.
    fn has_head(&self) -> bool;

    /// A matrix, already in the format it shall have.
    ///
    /// # Errors
    /// An [`Error`] naming the tensor.
    fn matrix(&self, layer: LayerRef, role: TensorRole) -> Result<PackedMatrix>;

    /// A matrix in pieces of rows, which, stacked, are the matrix: for a source that has formats for the rows of one matrix.
    ///
    /// # Errors
    /// An [`Error`] naming the tensor.
    fn stack(&self, layer: LayerRef, role: TensorRole) -> Result<Vec<PackedMatrix>> {
        Ok(vec![self.matrix(layer, role)?])
    }

    /// The experts of a layer, stacked: gate and up of expert 0, of expert 1, …; or down of each.
    ///
    /// # Errors
    /// An [`Error`] naming the tensor.
    fn experts(&self, layer: LayerRef, part: ExpertPart) -> Result<Vec<PackedMatrix>>;

    /// For a source of random values: the runs of rows of a matrix, which a backend that can makes by itself. Empty for
    /// every other source.
    fn synthetic(&self, layer: LayerRef, role: TensorRole) -> Vec<Synthetic> {
        let _ = (layer, role);
        Vec::new()
    }

    /// As [`WeightSource::synthetic`], for the experts of a layer.
    fn synthetic_experts(&self, layer: LayerRef, part: ExpertPart) -> Vec<Synthetic> {
        let _ = (layer, part);
        Vec::new()
    }

    /// A small parameter vector in f32.
    ///
    /// # Errors
    /// An [`Error`] naming the tensor.
    fn vector(&self, layer: LayerRef, role: VectorRole) -> Result<Vec<f32>>;
}

/// How far loading has come.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct LoadProgress<'a> {
    /// Parts that are on the device: embedding, layers, head, MTP block.
    pub done: usize,
    /// All parts.
    pub total: usize,
    /// Weight bytes on the device so far.
    pub bytes: usize,
    /// The part that was finished.
    pub part: &'a str,
}

/// A checkpoint read through a recipe.
pub(super) struct Converted<'a> {
    pub(super) table: &'a WeightTable,
    pub(super) recipe: &'a Recipe,
}

impl WeightSource for Converted<'_> {
    fn config(&self) -> &Config {
        self.table.config()
    }

    fn has_mtp(&self) -> bool {
        self.table.mtp() == MtpState::Complete
    }

    fn has_head(&self) -> bool {
        !self.table.shares_head()
    }

    fn matrix(&self, layer: LayerRef, role: TensorRole) -> Result<PackedMatrix> {
        self.table.matrix(layer, role, self.recipe)
    }

    fn stack(&self, layer: LayerRef, role: TensorRole) -> Result<Vec<PackedMatrix>> {
        self.table.stack(layer, role, self.recipe)
    }

    fn experts(&self, layer: LayerRef, part: ExpertPart) -> Result<Vec<PackedMatrix>> {
        self.table.experts(layer, part, self.recipe)
    }

    fn vector(&self, layer: LayerRef, role: VectorRole) -> Result<Vec<f32>> {
        self.table.vector(layer, role)
    }
}

struct Loader<'a, B: InferenceBackend> {
    backend: &'a B,
    queue: B::Queue,
    source: &'a dyn WeightSource,
    bytes: usize,
}

pub(super) fn load<B: InferenceBackend>(
    backend: &B,
    source: &dyn WeightSource,
    progress: &mut dyn FnMut(LoadProgress<'_>),
) -> Result<Inner<B>> {
    let config = source.config().clone();
    let mut loader = Loader { backend, queue: backend.queue()?, source, bytes: 0 };
    let total = config.layers.len() + 1 + usize::from(source.has_head()) + usize::from(source.has_mtp());
    let mut done = 0;
    let mut tell = |bytes: usize, part: &str| {
        done += 1;
        progress(LoadProgress { done, total, bytes, part });
    };

    let embedding = loader.matrix(LayerRef::Root, TensorRole::Embedding, config.vocab, config.hidden)?;
    tell(loader.bytes, "embedding");
    let mut layers = Vec::with_capacity(config.layers.len());
    for (i, kind) in config.layers.iter().enumerate() {
        layers.push(loader.layer(LayerRef::Main(i), *kind, &config)?);
        tell(loader.bytes, &format!("layer {i}"));
    }
    let final_norm = loader.vector(LayerRef::Root, VectorRole::FinalNorm, 1, config.hidden)?;
    let head = if source.has_head() {
        let head = loader.matrix(LayerRef::Root, TensorRole::Head, config.vocab, config.hidden)?;
        tell(loader.bytes, "head");
        head
    } else {
        embedding.clone()
    };
    let mtp = if source.has_mtp() {
        let mtp = loader.mtp(&config)?;
        tell(loader.bytes, "MTP block");
        Some(mtp)
    } else {
        None
    };
    let (inverse, magnitude) = inverse_frequencies(&config.attention.rope);
    let frequencies = loader.floats("rotary frequencies", &inverse, 1, inverse.len())?;
    let bytes = loader.bytes;
    Ok(Inner {
        backend: backend.clone(),
        config,
        embedding,
        layers,
        final_norm,
        head,
        mtp,
        frequencies,
        magnitude,
        bytes,
    })
}

impl<B: InferenceBackend> Loader<'_, B> {
    fn prepare(&mut self, parts: &[PackedMatrix], what: &'static str, rows: usize, cols: usize) -> Result<B::Weight> {
        let refs: Vec<_> = parts.iter().map(PackedMatrix::as_ref).collect();
        let weight = self.backend.prepare(&refs)?;
        self.checked(weight, what, rows, cols)
    }

    /// A weight of random values made on the device; `None` if the source or the backend has none.
    fn synthesize(
        &mut self,
        parts: &[Synthetic],
        what: &'static str,
        rows: usize,
        cols: usize,
    ) -> Result<Option<B::Weight>> {
        if parts.is_empty() {
            return Ok(None);
        }
        match self.backend.synthesize(parts)? {
            Some(weight) => self.checked(weight, what, rows, cols).map(Some),
            None => Ok(None),
        }
    }

    fn checked(&mut self, weight: B::Weight, what: &'static str, rows: usize, cols: usize) -> Result<B::Weight> {
        if (weight.rows(), weight.cols()) != (rows, cols) {
            return Err(Error::Core(CoreError::Shape {
                op: "load",
                what,
                expected: format!("[{rows}, {cols}]"),
                got: format!("[{}, {}]", weight.rows(), weight.cols()),
            }));
        }
        self.bytes += weight.bytes();
        Ok(weight)
    }

    fn matrix(&mut self, layer: LayerRef, role: TensorRole, rows: usize, cols: usize) -> Result<B::Weight> {
        if let Some(weight) = self.synthesize(&self.source.synthetic(layer, role), "matrix", rows, cols)? {
            return Ok(weight);
        }
        let stack = self.source.stack(layer, role)?;
        self.prepare(&stack, "matrix", rows, cols)
    }

    /// A matrix as one weight for each piece, with the first row of each.
    fn pieces(
        &mut self,
        layer: LayerRef,
        role: TensorRole,
        rows: usize,
        cols: usize,
    ) -> Result<Vec<(usize, B::Weight)>> {
        let (mut first, mut made) = (0, Vec::new());
        for part in self.source.synthetic(layer, role) {
            let Some(weight) = self.synthesize(&[part], "matrix", part.rows, cols)? else { break };
            made.push((first, weight));
            first += part.rows;
        }
        if !made.is_empty() {
            return Ok(made);
        }
        let stack = self.source.stack(layer, role)?;
        let found = stack.iter().map(PackedMatrix::rows).sum::<usize>();
        if found != rows {
            return Err(Error::Core(CoreError::Shape {
                op: "load",
                what: "matrix",
                expected: format!("[{rows}, {cols}]"),
                got: format!("{found} rows"),
            }));
        }
        let mut first = 0;
        let mut piece = |m: PackedMatrix| {
            let (at, count) = (first, m.rows());
            first += count;
            Ok((at, self.prepare(&[m], "matrix", count, cols)?))
        };
        stack.into_iter().map(&mut piece).collect()
    }

    fn pair(&mut self, layer: LayerRef, roles: [TensorRole; 2], rows: usize, cols: usize) -> Result<B::Weight> {
        let random = roles.map(|role| self.source.synthetic(layer, role)).concat();
        if let Some(weight) = self.synthesize(&random, "gate and up", 2 * rows, cols)? {
            return Ok(weight);
        }
        let mut parts = self.source.stack(layer, roles[0])?;
        parts.extend(self.source.stack(layer, roles[1])?);
        self.prepare(&parts, "gate and up", 2 * rows, cols)
    }

    fn experts(&mut self, layer: LayerRef, part: ExpertPart, rows: usize, cols: usize) -> Result<B::Weight> {
        let what = match part {
            ExpertPart::GateUp => "expert gate and up",
            ExpertPart::Down => "expert down",
        };
        if let Some(weight) = self.synthesize(&self.source.synthetic_experts(layer, part), what, rows, cols)? {
            return Ok(weight);
        }
        let stack = self.source.experts(layer, part)?;
        self.prepare(&stack, what, rows, cols)
    }

    fn vector(&mut self, layer: LayerRef, role: VectorRole, rows: usize, cols: usize) -> Result<View<B>> {
        let values = self.source.vector(layer, role)?;
        self.floats("vector", &values, rows, cols)
    }

    fn floats(&mut self, what: &'static str, values: &[f32], rows: usize, cols: usize) -> Result<View<B>> {
        if values.len() != rows * cols {
            return Err(Error::Core(CoreError::Shape {
                op: "load",
                what,
                expected: format!("{rows} × {cols} values"),
                got: values.len().to_string(),
            }));
        }
        let view = View::new(self.backend.alloc(what, values.len() * 4)?, DType::F32, 0, rows, cols)?;
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.backend.upload(&mut self.queue, &view, &bytes)?;
        self.bytes += bytes.len();
        Ok(view)
    }

    fn norm(&mut self, layer: LayerRef, role: VectorRole, config: &Config) -> Result<Norm<B>> {
        Ok(Norm { gain: self.vector(layer, role, 1, config.hidden)?, eps: config.eps as f32 })
    }

    fn layer(&mut self, layer: LayerRef, kind: LayerKind, config: &Config) -> Result<LayerWeights<B>> {
        Ok(LayerWeights {
            input_norm: self.norm(layer, VectorRole::InputNorm, config)?,
            mixer: match kind {
                LayerKind::LinearAttention => Mixer::Gdn(Box::new(self.gdn(layer, config)?)),
                LayerKind::FullAttention => Mixer::Attention(self.attention(layer, config)?),
            },
            ffn_norm: self.norm(layer, VectorRole::PostNorm, config)?,
            ffn: self.ffn(layer, config)?,
        })
    }

    fn attention(&mut self, layer: LayerRef, config: &Config) -> Result<AttentionWeights<B>> {
        let (a, h) = (&config.attention, config.hidden);
        let mut gains = self.source.vector(layer, VectorRole::QNorm)?;
        gains.extend(self.source.vector(layer, VectorRole::KNorm)?);
        Ok(AttentionWeights {
            query_gate: self.matrix(layer, TensorRole::AttnQ, a.heads * 2 * a.head_dim, h)?,
            key: self.matrix(layer, TensorRole::AttnK, a.kv_heads * a.head_dim, h)?,
            value: self.matrix(layer, TensorRole::AttnV, a.kv_heads * a.head_dim, h)?,
            output: self.matrix(layer, TensorRole::AttnOut, h, a.heads * a.head_dim)?,
            gains: self.floats("query and key norm", &gains, 2, a.head_dim)?,
        })
    }

    fn gdn(&mut self, layer: LayerRef, config: &Config) -> Result<GdnWeights<B>> {
        let (g, h) = (config.gdn, config.hidden);
        Ok(GdnWeights {
            qkv: self.pieces(layer, TensorRole::GdnQkv, g.channels(), h)?,
            z: self.matrix(layer, TensorRole::GdnZ, g.values(), h)?,
            a: self.matrix(layer, TensorRole::GdnA, g.value_heads, h)?,
            b: self.matrix(layer, TensorRole::GdnB, g.value_heads, h)?,
            output: self.matrix(layer, TensorRole::GdnOut, h, g.values())?,
            params: GdnParams {
                dims: g,
                conv: self.vector(layer, VectorRole::Conv, g.channels(), g.conv_kernel)?,
                a_log: self.vector(layer, VectorRole::ALog, 1, g.value_heads)?,
                dt_bias: self.vector(layer, VectorRole::DtBias, 1, g.value_heads)?,
                gain: self.vector(layer, VectorRole::GdnNorm, 1, g.value_dim)?,
                eps: config.eps as f32,
                gate: config.output_gate,
            },
        })
    }

    fn ffn(&mut self, layer: LayerRef, config: &Config) -> Result<FfnWeights<B>> {
        let h = config.hidden;
        match config.ffn {
            Ffn::Dense { intermediate } => Ok(FfnWeights::Dense {
                gate_up: self.pair(layer, [TensorRole::MlpGate, TensorRole::MlpUp], intermediate, h)?,
                down: self.matrix(layer, TensorRole::MlpDown, h, intermediate)?,
            }),
            Ffn::Moe { experts, width, shared_width, renormalise, .. } => {
                let gate_up = self.experts(layer, ExpertPart::GateUp, experts * 2 * width, h)?;
                let down = self.experts(layer, ExpertPart::Down, experts * h, width)?;
                Ok(FfnWeights::Moe {
                    router: self.matrix(layer, TensorRole::Router, experts, h)?,
                    shared_gate: self.matrix(layer, TensorRole::SharedExpertGate, 1, h)?,
                    gate_up,
                    down,
                    shared_gate_up: self.pair(
                        layer,
                        [TensorRole::SharedGate, TensorRole::SharedUp],
                        shared_width,
                        h,
                    )?,
                    shared_down: self.matrix(layer, TensorRole::SharedDown, h, shared_width)?,
                    renormalise,
                })
            }
        }
    }

    fn mtp(&mut self, config: &Config) -> Result<MtpWeights<B>> {
        let (layer, h) = (LayerRef::Mtp, config.hidden);
        Ok(MtpWeights {
            embedding_norm: self.norm(layer, VectorRole::EmbeddingNorm, config)?,
            hidden_norm: self.norm(layer, VectorRole::HiddenNorm, config)?,
            fc: self.matrix(layer, TensorRole::MtpFc, h, 2 * h)?,
            layer: self.layer(layer, LayerKind::FullAttention, config)?,
            norm: self.norm(layer, VectorRole::FinalNorm, config)?,
        })
    }
}
