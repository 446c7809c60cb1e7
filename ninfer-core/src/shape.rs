//! The shape of a model: every dimension that decides its parameters, its state and the bytes it moves.
//!
//! [`ModelShape`] knows no file and no device. From it follow parameter counts ([`ModelShape::parameters`]), the list of
//! tensors ([`ModelShape::tensors`]), the memory plan ([`crate::memory`]) and the roofline ([`crate::roofline`]).
//! [`published()`] has the sizes that were published.

mod published;
mod tensors;

use serde::{Deserialize, Serialize};

pub use self::published::{PUBLISHED, published};
pub use self::tensors::{Part, Role, TensorShape};
use crate::{Error, Result};

/// Largest number of rows or columns a tensor may have; products of two then fit in 64 bits in every weight format.
pub const MAX_DIM: usize = 1 << 28;
/// Tokens a page of the KV cache holds.
pub const KV_PAGE: usize = 64;

/// What mixes tokens in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LayerKind {
    /// Gated DeltaNet: convolution window and recurrent matrix, constant in the context length.
    LinearAttention,
    /// Gated softmax attention with a KV cache.
    FullAttention,
}

/// Heads of the full-attention layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AttentionShape {
    /// Query heads Hq.
    pub query_heads: usize,
    /// Key/value heads Hkv; divides Hq.
    pub kv_heads: usize,
    /// Features per head D (not `hidden / query_heads`).
    pub head_dim: usize,
}

/// Heads of the Gated DeltaNet layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GdnShape {
    /// Query/key heads Hk.
    pub key_heads: usize,
    /// Value heads Hv; a multiple of Hk.
    pub value_heads: usize,
    /// Features per key head dk.
    pub key_dim: usize,
    /// Features per value head dv.
    pub value_dim: usize,
    /// Taps K of the causal convolution.
    pub conv_kernel: usize,
}

impl GdnShape {
    /// Key features `Kd = Hk · dk`.
    #[must_use]
    pub const fn keys(&self) -> usize {
        self.key_heads.saturating_mul(self.key_dim)
    }

    /// Value features `Vd = Hv · dv`.
    #[must_use]
    pub const fn values(&self) -> usize {
        self.value_heads.saturating_mul(self.value_dim)
    }

    /// Channels of the convolution `C = 2 Kd + Vd`.
    #[must_use]
    pub const fn channels(&self) -> usize {
        self.keys().saturating_mul(2).saturating_add(self.values())
    }
}

/// The feed-forward network of every layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum FfnShape {
    /// SwiGLU.
    Dense {
        /// Width I.
        intermediate: usize,
    },
    /// Routed experts and one shared expert, all SwiGLU.
    Moe {
        /// Experts E.
        experts: usize,
        /// Experts a token is sent to.
        top_k: usize,
        /// Width M of an expert.
        width: usize,
        /// Width S of the shared expert.
        shared_width: usize,
    },
}

/// Dimensions of a text model of the Qwen3.5 / 3.6 / 3.8 family.
///
/// ```
/// let shape = ninfer_core::shape::published("35b-a3b")?;
/// assert_eq!(shape.full_layers(), 10);
/// assert_eq!(shape.parameters().text(), 34_660_610_688);
/// # Ok::<(), ninfer_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ModelShape {
    /// Width H of the residual stream.
    pub hidden: usize,
    /// The layers in order.
    pub layers: Vec<LayerKind>,
    /// Full-attention heads.
    pub attention: AttentionShape,
    /// Gated DeltaNet heads.
    pub gdn: GdnShape,
    /// Feed-forward network.
    pub ffn: FfnShape,
    /// Rows V of embedding and head.
    pub vocab: usize,
    /// Whether the head is the embedding matrix.
    pub tied: bool,
    /// Whether an MTP block (one full-attention layer and its projection) is present.
    pub mtp: bool,
}

/// Parameter counts of the parts of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Parameters {
    /// Embedding matrix.
    pub embedding: u64,
    /// All layers.
    pub layers: u64,
    /// What one token uses of the layers: all of a dense layer, the routed and the shared experts of a MoE layer.
    pub layers_per_token: u64,
    /// The norm after the last layer.
    pub final_norm: u64,
    /// The output head; 0 where it is the embedding.
    pub head: u64,
    /// The MTP block.
    pub mtp: u64,
}

impl Parameters {
    /// Embedding, layers, final norm and head, without MTP.
    #[must_use]
    pub const fn text(&self) -> u64 {
        self.embedding.saturating_add(self.layers).saturating_add(self.final_norm).saturating_add(self.head)
    }

    /// All of it.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.text().saturating_add(self.mtp)
    }
}

impl ModelShape {
    /// The layer pattern of all published sizes: layer i is full attention iff `(i + 1) % interval == 0`.
    ///
    /// An interval of 0 gives no full-attention layer.
    #[must_use]
    pub fn layer_pattern(layers: usize, interval: usize) -> Vec<LayerKind> {
        (1..=layers)
            .map(|n| match n.checked_rem(interval) {
                Some(0) => LayerKind::FullAttention,
                _ => LayerKind::LinearAttention,
            })
            .collect()
    }

    /// Number of Gated DeltaNet layers.
    #[must_use]
    pub fn gdn_layers(&self) -> usize {
        self.layers.iter().filter(|&&k| k == LayerKind::LinearAttention).count()
    }

    /// Number of full-attention layers, the MTP layer not counted.
    #[must_use]
    pub fn full_layers(&self) -> usize {
        self.layers.len() - self.gdn_layers()
    }

    /// Parameters by part. Counts saturate at `u64::MAX`.
    #[must_use]
    pub fn parameters(&self) -> Parameters {
        let mut sum = Parameters::default();
        for t in self.tensors() {
            let all = t.parameters();
            let slot = match t.part {
                Part::Embedding => &mut sum.embedding,
                Part::FinalNorm => &mut sum.final_norm,
                Part::Head => &mut sum.head,
                Part::Mtp => &mut sum.mtp,
                Part::Layer(_) => {
                    let used = t.elements().saturating_mul(t.read as u64);
                    sum.layers_per_token = sum.layers_per_token.saturating_add(used);
                    &mut sum.layers
                }
            };
            *slot = slot.saturating_add(all);
        }
        sum
    }

    /// Bytes of the recurrent matrices of one sequence: GDN layers · Hv · dk · dv · 4 (always f32).
    #[must_use]
    pub fn gdn_state_bytes(&self) -> u64 {
        let g = &self.gdn;
        product([self.gdn_layers(), g.value_heads, g.key_dim, g.value_dim, 4])
    }

    /// Bytes of the convolution windows of one sequence: GDN layers · C · (K − 1) · `element_size`.
    #[must_use]
    pub fn conv_state_bytes(&self, element_size: usize) -> u64 {
        product([self.gdn_layers(), self.gdn.channels(), self.gdn.conv_kernel.saturating_sub(1), element_size])
    }

    /// Bytes a verified token leaves in the rollback record: per GDN layer raw k and v and the convolution column in
    /// elements of `element_size` bytes, g and β in f32.
    ///
    /// ```
    /// let shape = ninfer_core::shape::published("27b")?;
    /// assert_eq!(shape.record_bytes_per_token(2), 48 * ((2048 + 6144 + 10240) * 2 + 2 * 48 * 4)); // 1.705 MiB
    /// # Ok::<(), ninfer_core::Error>(())
    /// ```
    #[must_use]
    pub fn record_bytes_per_token(&self, element_size: usize) -> u64 {
        let g = &self.gdn;
        let columns = g.keys().saturating_add(g.values()).saturating_add(g.channels());
        let gates = g.value_heads.saturating_mul(8);
        product([self.gdn_layers(), columns.saturating_mul(element_size).saturating_add(gates)])
    }

    /// Checks that every dimension is at least 1 and small enough for the arithmetic of this crate, and that heads divide.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] naming the first dimension that is not legal.
    pub fn validate(&self) -> Result<()> {
        let (a, g) = (&self.attention, &self.gdn);
        let mut dims = vec![
            ("hidden size", self.hidden),
            ("number of layers", self.layers.len()),
            ("vocabulary", self.vocab),
            ("query heads", a.query_heads),
            ("KV heads", a.kv_heads),
            ("head size", a.head_dim),
            ("GDN key heads", g.key_heads),
            ("GDN value heads", g.value_heads),
            ("GDN key head size", g.key_dim),
            ("GDN value head size", g.value_dim),
            ("convolution kernel", g.conv_kernel),
        ];
        match self.ffn {
            FfnShape::Dense { intermediate } => dims.push(("FFN width", intermediate)),
            FfnShape::Moe { experts, top_k, width, shared_width } => {
                dims.extend([("experts", experts), ("expert width", width), ("shared expert width", shared_width)]);
                if top_k == 0 || top_k > experts {
                    return Err(Error::OutOfRange {
                        what: "experts per token",
                        got: top_k.to_string(),
                        legal: format!("1 to {experts}"),
                    });
                }
            }
        }
        for (what, value) in dims {
            if value == 0 || value > MAX_DIM {
                return Err(Error::OutOfRange { what, got: value.to_string(), legal: format!("1 to {MAX_DIM}") });
            }
        }
        if !a.query_heads.is_multiple_of(a.kv_heads) {
            return Err(Error::OutOfRange {
                what: "query heads",
                got: a.query_heads.to_string(),
                legal: format!("multiples of the {} KV heads", a.kv_heads),
            });
        }
        if !g.value_heads.is_multiple_of(g.key_heads) {
            return Err(Error::OutOfRange {
                what: "GDN value heads",
                got: g.value_heads.to_string(),
                legal: format!("multiples of the {} key heads", g.key_heads),
            });
        }
        match self.tensors().find(|t| t.rows > MAX_DIM || t.cols > MAX_DIM) {
            None => Ok(()),
            Some(t) => Err(Error::OutOfRange {
                what: "tensor dimension",
                got: format!("{} [{}, {}]", t.role, t.rows, t.cols),
                legal: format!("1 to {MAX_DIM}"),
            }),
        }
    }
}

/// Saturating product of dimensions.
pub(crate) fn product<const N: usize>(factors: [usize; N]) -> u64 {
    factors.iter().fold(1, |acc: u64, &f| acc.saturating_mul(f as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// name, text, layers, layers per token, MTP, KV bytes per token (bf16), GDN state in MiB.
    type Row = (&'static str, u64, u64, u64, u64, u64, u64);

    /// Counts of the published sizes, worked out from the tensor shapes; the 27B, 35B and MTP totals agree with totals
    /// reported for the released files.
    const TABLE: [Row; 8] = [
        ("0.8b", 752_393_024, 498_112_320, 498_112_320, 20_452_864, 12_288, 18),
        ("2b", 1_881_825_088, 1_373_263_680, 1_373_263_680, 60_828_160, 12_288, 18),
        ("4b", 4_205_751_296, 3_570_049_536, 3_570_049_536, 120_599_552, 32_768, 48),
        ("9b", 8_953_803_264, 6_919_561_728, 6_919_561_728, 243_290_624, 32_768, 48),
        ("27b", 26_895_998_464, 24_353_196_544, 24_353_196_544, 424_699_392, 65_536, 144),
        ("35b-a3b", 34_660_610_688, 33_643_489_920, 2_437_868_160, 844_640_768, 20_480, 60),
        ("122b-a10b", 122_111_526_912, 120_585_845_760, 8_245_607_424, 2_523_679_232, 24_576, 144),
        ("397b-a17b", 396_346_350_336, 394_312_108_800, 15_314_799_360, 6_595_568_128, 30_720, 180),
    ];

    #[test]
    fn counts_equal_the_published_table() {
        use crate::memory::KvFormat;
        assert_eq!(TABLE.map(|r| r.0), PUBLISHED);
        for (name, text, layers, per_token, mtp, kv, state) in TABLE {
            let shape = published(name).unwrap();
            shape.validate().unwrap();
            let p = shape.parameters();
            assert_eq!((p.text(), p.layers, p.layers_per_token, p.mtp), (text, layers, per_token, mtp), "{name}");
            assert_eq!(KvFormat::Bf16.bytes_per_token(&shape), kv, "{name}");
            assert_eq!(shape.gdn_state_bytes(), state << 20, "{name}");
        }
    }

    #[test]
    fn record_is_the_published_size() {
        let mib = |b: u64| b as f64 / f64::from(1 << 20);
        let dense = published("27b").unwrap();
        let moe = published("35b-a3b").unwrap();
        assert!((mib(dense.record_bytes_per_token(2)) - 1.705).abs() < 5e-4);
        assert!((mib(moe.record_bytes_per_token(2)) - 0.828).abs() < 5e-4);
    }

    #[test]
    fn layer_pattern_is_every_fourth() {
        let layers = ModelShape::layer_pattern(9, 4);
        let full: Vec<usize> = (0..9).filter(|&i| layers[i] == LayerKind::FullAttention).collect();
        assert_eq!(full, [3, 7]);
        assert!(ModelShape::layer_pattern(5, 0).iter().all(|&k| k == LayerKind::LinearAttention));
    }

    #[test]
    fn illegal_shapes_are_refused_and_never_panic() {
        let good = published("35b-a3b").unwrap();
        let broken: [fn(&mut ModelShape); 9] = [
            |s| s.hidden = 0,
            |s| s.layers.clear(),
            |s| s.vocab = usize::MAX,
            |s| s.attention.kv_heads = 3,
            |s| s.gdn.key_heads = 5,
            |s| s.gdn.conv_kernel = 0,
            |s| s.attention.query_heads = MAX_DIM,
            |s| s.gdn.value_dim = MAX_DIM,
            |s| s.ffn = FfnShape::Moe { experts: 4, top_k: 5, width: 8, shared_width: 8 },
        ];
        for breakage in broken {
            let mut shape = good.clone();
            breakage(&mut shape);
            assert!(matches!(shape.validate(), Err(Error::OutOfRange { .. })), "{shape:?}");
            let _ = (shape.parameters(), shape.gdn_state_bytes(), shape.conv_state_bytes(usize::MAX));
            let _ = shape.record_bytes_per_token(usize::MAX);
        }
    }

    #[test]
    fn shape_survives_json() {
        let shape = published("122b-a10b").unwrap();
        let text = serde_json::to_string(&shape).unwrap();
        assert_eq!(serde_json::from_str::<ModelShape>(&text).unwrap(), shape);
    }
}
