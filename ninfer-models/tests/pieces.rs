//! Weights whose rows come in pieces, and weights that take their inputs as codes.

mod support;

use ninfer_core::WeightFormat;
use ninfer_core::format::ActivationPrecision;
use ninfer_core::model::{CausalModel, LaneOptions, RoundRow};
use ninfer_kernels::cpu::Cpu;
use ninfer_models::qwen35::{SyntheticWeights, WeightSource};
use ninfer_models::session::SessionOptions;
use ninfer_models::weights::{ExpertPart, LayerRef, VectorRole};
use ninfer_models::{Config, Error, Qwen35, Result};
use ninfer_quant::{PackedMatrix, TensorRole};
use support::*;

/// Another source's weights with changes.
struct Changed {
    source: SyntheticWeights,
    /// Rows of the first piece of `in_proj_qkv`.
    cut: Option<usize>,
    /// Whether the last piece is left out.
    loses_rows: bool,
    activations: ActivationPrecision,
}

impl Changed {
    fn model(moe: bool, format: WeightFormat, cut: Option<usize>, activations: ActivationPrecision) -> Qwen35<Cpu> {
        let source =
            Self { source: SyntheticWeights::new(config(moe), format, 7), cut, loses_rows: false, activations };
        Qwen35::from_source(&Cpu::new(), &source, &mut |_| {}).unwrap()
    }

    fn coded(&self, m: PackedMatrix) -> PackedMatrix {
        if self.activations.fits(m.format()) { m.with_activations(self.activations).unwrap() } else { m }
    }
}

impl WeightSource for Changed {
    fn config(&self) -> &Config {
        self.source.config()
    }

    fn has_mtp(&self) -> bool {
        self.source.has_mtp()
    }

    fn has_head(&self) -> bool {
        self.source.has_head()
    }

    fn matrix(&self, layer: LayerRef, role: TensorRole) -> Result<PackedMatrix> {
        self.source.matrix(layer, role).map(|m| self.coded(m))
    }

    fn stack(&self, layer: LayerRef, role: TensorRole) -> Result<Vec<PackedMatrix>> {
        let m = self.matrix(layer, role)?;
        let Some(cut) = self.cut else { return Ok(vec![m]) };
        let cuts = match role {
            TensorRole::GdnQkv => vec![0..cut, cut..m.rows()],
            // These stay one weight, stacked of their pieces.
            TensorRole::AttnQ | TensorRole::MlpGate => vec![0..20, 20..32, 32..m.rows()],
            _ => return Ok(vec![m]),
        };
        let kept = cuts.len() - usize::from(self.loses_rows);
        Ok(cuts.into_iter().take(kept).map(|rows| m.slice_rows(rows).unwrap()).collect())
    }

    fn experts(&self, layer: LayerRef, part: ExpertPart) -> Result<Vec<PackedMatrix>> {
        Ok(self.source.experts(layer, part)?.into_iter().map(|m| self.coded(m)).collect())
    }

    fn vector(&self, layer: LayerRef, role: VectorRole) -> Result<Vec<f32>> {
        self.source.vector(layer, role)
    }
}

/// Logits behind the columns of a round, one column at a time.
fn steps(model: &Qwen35<Cpu>, text: &[u32], tokens: &[u32]) -> Vec<f32> {
    let mut s = session(model, SessionOptions::new(256));
    let mut lane = s.open_lane(&LaneOptions::new(128)).unwrap();
    let mut logits = Vec::new();
    start(&mut s, &mut lane, &text[..1], 0);
    for t in text[1..].iter().chain(tokens) {
        let mut lanes = [&mut lane];
        let round = s.verify(&mut lanes, &[RoundRow::new(*t).with_logits()]).unwrap();
        logits.extend(round.outcomes()[0].logits.clone().unwrap());
        round.commit(&[1]).unwrap();
    }
    logits
}

/// Products of prompts are blocked by the rows of a weight, so cutting one changes the order of f32 additions.
#[track_caller]
fn close(a: &[f32], b: &[f32]) {
    let worst = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(a.len() == b.len() && worst < 5e-4, "{worst}");
}

#[test]
fn pieces_compute_what_the_whole_matrix_computes() {
    let native = ActivationPrecision::Native;
    for moe in [false, true] {
        for format in [WeightFormat::Bf16, WeightFormat::Fp8Row] {
            let whole = Changed::model(moe, format, None, native);
            let text = prompt(20, 320);
            let expected = steps(&whole, &text, &[7, 8]);
            for cut in [1, 64, 127] {
                let pieces = Changed::model(moe, format, Some(cut), native);
                assert_eq!(pieces.weight_bytes(), whole.weight_bytes());
                close(&steps(&pieces, &text, &[7, 8]), &expected);
                let mut sessions = [&whole, &pieces].map(|m| session(m, SessionOptions::new(256)));
                let [a, b] = sessions.each_mut().map(|s| {
                    let mut lane = open(s, 128);
                    prompt_logits(s, &mut lane, &prompt(100, 320))
                });
                close(&a, &b);
            }
        }
    }
}

#[test]
fn pieces_that_are_not_the_matrix_are_refused() {
    let source = Changed {
        source: SyntheticWeights::new(config(false), WeightFormat::Bf16, 7),
        cut: Some(64),
        loses_rows: true,
        activations: ActivationPrecision::Native,
    };
    let error = Qwen35::from_source(&Cpu::new(), &source, &mut |_| {}).unwrap_err();
    assert!(matches!(error, Error::Core(ninfer_core::Error::Shape { .. })), "{error}");
}

/// Drafts change no token, and columns of a round are bit for bit what single columns are.
#[test]
fn codes_keep_the_promises_of_speculation() {
    for moe in [false, true] {
        let model = Changed::model(moe, WeightFormat::Fp8Row, None, ActivationPrecision::E4m3Token);
        let native = Changed::model(moe, WeightFormat::Fp8Row, None, ActivationPrecision::Native);
        let text = prompt(20, 320);
        let coded = steps(&model, &text, &[]);
        assert_ne!(coded, steps(&native, &text, &[]));
        let mut s = session(&model, SessionOptions::new(256).with_max_drafts(7));
        let tokens = greedy(&mut s, &text, 9);
        let mut lane = open(&mut s, 128);
        start(&mut s, &mut lane, &text, 0);
        let mut lanes = [&mut lane];
        let row = RoundRow::new(tokens[0]).with_drafts(&tokens[1..8]).with_logits();
        let round = s.verify(&mut lanes, &[row]).unwrap();
        assert_eq!((round.outcomes()[0].accepted, &round.outcomes()[0].tokens[..]), (7, &tokens[1..9]));
    }
}
