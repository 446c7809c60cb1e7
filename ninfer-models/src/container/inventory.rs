//! Which objects of a container are which weights of the model.

use std::collections::BTreeMap;
use std::ops::Range;

use ninfer_core::shape::LayerKind;
use ninfer_quant::TensorRole;
use ninfer_quant::container::ContainerFormat;

use super::{Container, ObjectKind};
use crate::config::Ffn;
use crate::error::NameList;
use crate::weights::{LayerRef, VectorRole};
use crate::{Config, Error, Result};

/// Objects that a text model skips: the vision tower, a drafter of another kind, the shortened head for drafts, and divisors
/// of quantised activations.
fn is_skipped(name: &str) -> bool {
    name.starts_with("vision/")
        || name.starts_with("dflash/")
        || name == "text/draft_head"
        || name == "text/draft_head_token_ids"
        || name.ends_with("/input_scale_divisor")
}

/// Rows of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Index into the objects of the container.
    pub(super) object: usize,
    pub(super) rows: Range<usize>,
}

/// Where the rows of a matrix are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// One below the other.
    Stack(Vec<Piece>),
    /// Query and gate rows of all heads, to be put together head by head: query rows, then gate rows.
    Heads { query: Piece, gate: Piece, heads: usize },
}

impl Source {
    pub(super) fn pieces(&self) -> Vec<&Piece> {
        match self {
            Self::Stack(pieces) => pieces.iter().collect(),
            Self::Heads { query, gate, .. } => vec![query, gate],
        }
    }
}

/// A matrix of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Bound {
    pub(super) source: Source,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

/// The weights of a model as found in a container.
///
/// Below `text/layers/{i}/` and `mtp/layer/` (H, I, Hq, … as in [`ninfer_core::ops`]):
///
/// | object | rows | modules |
/// |---|---|---|
/// | `attention/query_key_gate_value` | query, key, gate, value | `q_proj` (per head query and gate), `k_proj`, `v_proj` |
/// | or `attention/query_key`, `attention/gate_value` | query, key; gate, value | the same |
/// | `attention/output` | \[H, Hq·D\] | `o_proj` |
/// | `gdn/query_key_value_z` | query, key, value, z | `in_proj_qkv`, `in_proj_z` |
/// | or `gdn/query_key`, `gdn/value_z` | query, key; value, z | the same |
/// | `gdn/a_b_projection` or `gdn/a_projection`, `gdn/b_projection` | a, b | `in_proj_a`, `in_proj_b` |
/// | `gdn/output` | \[H, Hv·dv\] | `out_proj` |
/// | `mlp/gate_up`, `mlp/down` | gate, up; \[H, I\] | `gate_proj`, `up_proj`, `down_proj` |
/// | `moe/router_shared_gate` | E router rows, one of the shared expert | `gate`, `shared_expert_gate` |
/// | `moe/routed_gate_up`, `moe/routed_down` | per expert: gate, up; H rows | the experts |
/// | `moe/shared_gate_up`, `moe/shared_down` | gate, up; \[H, S\] | `shared_expert.*` |
/// | `input_norm`, `post_attention_norm`, `attention/query_norm`, `attention/key_norm`, `gdn/norm`, `gdn/a_log`, `gdn/dt_bias` | | vectors, norms zero-centred as in checkpoints |
/// | `gdn/convolution` | \[4, C\], one tap after the other | `conv1d`, transposed |
///
/// Outside: `text/token_embedding`, `text/output_head`, `text/final_norm`, `mtp/input_projection` (`mtp.fc`),
/// `mtp/embedding_norm`, `mtp/hidden_norm`, `mtp/final_norm`. Any object may have any format that can hold it. Skipped
/// knowingly: `vision/…`, `dflash/…`, `text/draft_head`, `text/draft_head_token_ids`, `…/input_scale_divisor`, and resources.
///
/// Where the rows of one module come from objects of different groupwise formats, they are read in the wider one, which
/// holds the same weights ([`ninfer_quant::widen`]).
#[derive(Debug, Default)]
pub struct Inventory {
    pub(super) matrices: BTreeMap<(LayerRef, TensorRole), Bound>,
    pub(super) vectors: BTreeMap<(LayerRef, VectorRole), usize>,
    /// Gate and up, and down, of all experts of a layer.
    pub(super) experts: BTreeMap<LayerRef, (usize, usize)>,
    pub(super) mtp: bool,
}

struct Binder<'a> {
    container: &'a Container,
    config: &'a Config,
    used: Vec<bool>,
    missing: NameList,
    out: Inventory,
}

impl Inventory {
    /// Finds all weights that a configuration asks for.
    ///
    /// # Errors
    /// [`Error::TensorList`] with what is missing and what is left over, [`Error::IncompleteMtp`], [`Error::NoHead`];
    /// [`Error::TensorShape`] and [`Error::TensorDType`] naming file and object.
    pub fn find(container: &Container, config: &Config) -> Result<Self> {
        let used = vec![false; container.objects().len()];
        let mut b = Binder { container, config, used, missing: NameList::default(), out: Self::default() };
        b.whole(LayerRef::Root, TensorRole::Embedding, "text/token_embedding", config.vocab, config.hidden)?;
        b.vector(LayerRef::Root, VectorRole::FinalNorm, "text/final_norm", &[config.hidden])?;
        for (i, &kind) in config.layers.iter().enumerate() {
            b.layer(LayerRef::Main(i), &format!("text/layers/{i}/"), kind)?;
        }
        let before_head = b.missing.len();
        if container.get("text/output_head").is_some() || !config.tied {
            b.whole(LayerRef::Root, TensorRole::Head, "text/output_head", config.vocab, config.hidden)?;
        }
        let head_missing = b.missing.len() > before_head;
        let main_missing = std::mem::take(&mut b.missing);
        b.out.mtp = container.objects().iter().any(|o| o.name().starts_with("mtp/"));
        if b.out.mtp {
            b.mtp()?;
        }
        let left = container
            .objects()
            .iter()
            .zip(&b.used)
            .filter(|(o, used)| !**used && *o.kind() != ObjectKind::Resource && !is_skipped(o.name()));
        let unexpected: NameList = left.map(|(o, _)| o.name()).collect();
        match (main_missing.len(), b.missing.len(), unexpected.len()) {
            (0, 0, 0) => Ok(b.out),
            (0, _, 0) => Err(Error::IncompleteMtp { missing: b.missing }),
            (1, 0, 0) if head_missing => Err(Error::NoHead { tensor: main_missing.to_string() }),
            _ => {
                let mut missing = main_missing;
                missing.append(b.missing);
                Err(Error::TensorList { missing, unexpected })
            }
        }
    }
}

impl Binder<'_> {
    /// The tensor of a name and a shape, marked used; noted as missing if it is not there.
    fn object(&mut self, name: &str, shape: &[usize]) -> Result<Option<usize>> {
        let Some(index) = self.container.index(name) else {
            self.missing.push(name);
            return Ok(None);
        };
        self.used[index] = true;
        let object = &self.container.objects()[index];
        let file = || self.container.path().to_owned();
        match object.kind() {
            ObjectKind::Tensor { shape: got, .. } if got != shape => Err(Error::TensorShape {
                file: file(),
                tensor: name.to_owned(),
                expected: shape.to_vec(),
                got: got.clone(),
            }),
            ObjectKind::Tensor { format, .. } if *format != ContainerFormat::I32 => Ok(Some(index)),
            kind => Err(Error::TensorDType {
                file: file(),
                tensor: name.to_owned(),
                expected: "a format of weights",
                got: if *kind == ObjectKind::Resource { "a resource" } else { "I32" }.to_owned(),
            }),
        }
    }

    fn has(&self, name: &str) -> bool {
        self.container.get(name).is_some()
    }

    fn put(&mut self, layer: LayerRef, role: TensorRole, source: Source, rows: usize, cols: usize) {
        self.out.matrices.insert((layer, role), Bound { source, rows, cols });
    }

    /// An object that is one matrix.
    fn whole(&mut self, layer: LayerRef, role: TensorRole, name: &str, rows: usize, cols: usize) -> Result<()> {
        self.parts(layer, name, cols, &[(role, rows)])
    }

    /// An object of several matrices, one below the other.
    fn parts(&mut self, layer: LayerRef, name: &str, cols: usize, parts: &[(TensorRole, usize)]) -> Result<()> {
        let total = parts.iter().map(|(_, rows)| rows).sum();
        if let Some(object) = self.object(name, &[total, cols])? {
            let mut start = 0;
            for &(role, rows) in parts {
                let piece = Piece { object, rows: start..start + rows };
                start += rows;
                self.put(layer, role, Source::Stack(vec![piece]), rows, cols);
            }
        }
        Ok(())
    }

    fn vector(&mut self, layer: LayerRef, role: VectorRole, name: &str, shape: &[usize]) -> Result<()> {
        let Some(index) = self.object(name, shape)? else { return Ok(()) };
        match self.container.objects()[index].kind() {
            ObjectKind::Tensor { format: ContainerFormat::Bf16 | ContainerFormat::F32, .. } => {
                self.out.vectors.insert((layer, role), index);
                Ok(())
            }
            ObjectKind::Tensor { format, .. } => Err(Error::TensorDType {
                file: self.container.path().to_owned(),
                tensor: name.to_owned(),
                expected: "BF16 or FP32",
                got: format.name().to_owned(),
            }),
            ObjectKind::Resource => Ok(()),
        }
    }

    fn layer(&mut self, layer: LayerRef, stem: &str, kind: LayerKind) -> Result<()> {
        let h = self.config.hidden;
        self.vector(layer, VectorRole::InputNorm, &format!("{stem}input_norm"), &[h])?;
        match kind {
            LayerKind::LinearAttention => self.gdn(layer, &format!("{stem}gdn/"))?,
            LayerKind::FullAttention => self.attention(layer, &format!("{stem}attention/"))?,
        }
        self.vector(layer, VectorRole::PostNorm, &format!("{stem}post_attention_norm"), &[h])?;
        match self.config.ffn {
            Ffn::Dense { intermediate } => {
                let parts = [(TensorRole::MlpGate, intermediate), (TensorRole::MlpUp, intermediate)];
                self.parts(layer, &format!("{stem}mlp/gate_up"), h, &parts)?;
                self.whole(layer, TensorRole::MlpDown, &format!("{stem}mlp/down"), h, intermediate)
            }
            Ffn::Moe { experts, width, shared_width, .. } => {
                let stem = format!("{stem}moe/");
                let parts = [(TensorRole::Router, experts), (TensorRole::SharedExpertGate, 1)];
                self.parts(layer, &format!("{stem}router_shared_gate"), h, &parts)?;
                // Sizes of a checked configuration multiply without overflow.
                let gate_up = self.object(&format!("{stem}routed_gate_up"), &[experts * 2 * width, h])?;
                let down = self.object(&format!("{stem}routed_down"), &[experts * h, width])?;
                if let (Some(gate_up), Some(down)) = (gate_up, down) {
                    self.out.experts.insert(layer, (gate_up, down));
                }
                let parts = [(TensorRole::SharedGate, shared_width), (TensorRole::SharedUp, shared_width)];
                self.parts(layer, &format!("{stem}shared_gate_up"), h, &parts)?;
                self.whole(layer, TensorRole::SharedDown, &format!("{stem}shared_down"), h, shared_width)
            }
        }
    }

    fn attention(&mut self, layer: LayerRef, stem: &str) -> Result<()> {
        let (a, h) = (&self.config.attention, self.config.hidden);
        let (heads, d, queries, keys) = (a.heads, a.head_dim, a.heads * a.head_dim, a.kv_heads * a.head_dim);
        let pair = [format!("{stem}query_key"), format!("{stem}gate_value")];
        let found = if self.has(&pair[0]) || self.has(&pair[1]) {
            let query_key = self.object(&pair[0], &[queries + keys, h])?;
            let gate_value = self.object(&pair[1], &[queries + keys, h])?;
            query_key.zip(gate_value).map(|(qk, gv)| ((qk, 0), (gv, 0)))
        } else {
            let rows = 2 * (queries + keys);
            let all = self.object(&format!("{stem}query_key_gate_value"), &[rows, h])?;
            all.map(|object| ((object, 0), (object, queries + keys)))
        };
        if let Some(((query_key, first), (gate_value, second))) = found {
            let piece = |object, start, rows| Piece { object, rows: start..start + rows };
            let (query, gate) = (piece(query_key, first, queries), piece(gate_value, second, queries));
            let (key, value) = (piece(query_key, first + queries, keys), piece(gate_value, second + queries, keys));
            self.put(layer, TensorRole::AttnQ, Source::Heads { query, gate, heads }, 2 * queries, h);
            self.put(layer, TensorRole::AttnK, Source::Stack(vec![key]), keys, h);
            self.put(layer, TensorRole::AttnV, Source::Stack(vec![value]), keys, h);
        }
        self.vector(layer, VectorRole::QNorm, &format!("{stem}query_norm"), &[d])?;
        self.vector(layer, VectorRole::KNorm, &format!("{stem}key_norm"), &[d])?;
        self.whole(layer, TensorRole::AttnOut, &format!("{stem}output"), h, queries)
    }

    fn gdn(&mut self, layer: LayerRef, stem: &str) -> Result<()> {
        let (g, h) = (self.config.gdn, self.config.hidden);
        let (channels, values, heads) = (g.channels(), g.values(), g.value_heads);
        let pair = [format!("{stem}query_key"), format!("{stem}value_z")];
        if self.has(&pair[0]) || self.has(&pair[1]) {
            let keys = channels - values;
            let query_key = self.object(&pair[0], &[keys, h])?;
            let value_z = self.object(&pair[1], &[2 * values, h])?;
            if let Some((query_key, value_z)) = query_key.zip(value_z) {
                let stack =
                    vec![Piece { object: query_key, rows: 0..keys }, Piece { object: value_z, rows: 0..values }];
                self.put(layer, TensorRole::GdnQkv, Source::Stack(stack), channels, h);
                let z = vec![Piece { object: value_z, rows: values..2 * values }];
                self.put(layer, TensorRole::GdnZ, Source::Stack(z), values, h);
            }
        } else {
            let parts = [(TensorRole::GdnQkv, channels), (TensorRole::GdnZ, values)];
            self.parts(layer, &format!("{stem}query_key_value_z"), h, &parts)?;
        }
        let pair = [(TensorRole::GdnA, "a_projection"), (TensorRole::GdnB, "b_projection")];
        if pair.iter().any(|(_, name)| self.has(&format!("{stem}{name}"))) {
            for (role, name) in pair {
                self.whole(layer, role, &format!("{stem}{name}"), heads, h)?;
            }
        } else {
            let parts = pair.map(|(role, _)| (role, heads));
            self.parts(layer, &format!("{stem}a_b_projection"), h, &parts)?;
        }
        self.whole(layer, TensorRole::GdnOut, &format!("{stem}output"), h, values)?;
        self.vector(layer, VectorRole::Conv, &format!("{stem}convolution"), &[g.conv_kernel, channels])?;
        self.vector(layer, VectorRole::ALog, &format!("{stem}a_log"), &[heads])?;
        self.vector(layer, VectorRole::DtBias, &format!("{stem}dt_bias"), &[heads])?;
        self.vector(layer, VectorRole::GdnNorm, &format!("{stem}norm"), &[g.value_dim])
    }

    fn mtp(&mut self) -> Result<()> {
        let (layer, h) = (LayerRef::Mtp, self.config.hidden);
        self.whole(layer, TensorRole::MtpFc, "mtp/input_projection", h, 2 * h)?;
        self.vector(layer, VectorRole::EmbeddingNorm, "mtp/embedding_norm", &[h])?;
        self.vector(layer, VectorRole::HiddenNorm, "mtp/hidden_norm", &[h])?;
        self.vector(layer, VectorRole::FinalNorm, "mtp/final_norm", &[h])?;
        self.layer(layer, "mtp/layer/", LayerKind::FullAttention)
    }
}
