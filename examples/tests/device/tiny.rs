//! Every golden tiny checkpoint: loaded in the formats it is stored in, and run, layer by layer and state by state.

use std::path::Path;

use half::bf16;
use ninfer_core::DType;
use ninfer_core::backend::InferenceBackend;
use ninfer_core::model::{CausalModel, PrefillEnd, RoundRow};
use ninfer_models::config::LayerKind;
use ninfer_models::session::LaneImage;
use ninfer_models::{Qwen35, SessionOptions};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

use crate::bench::{
    Extent, is_exact, model, on_every_backend, open, prefill, prompt_logits, round, same_bits, tiny_model, tokens,
};

const MODELS: [&str; 3] = ["tiny-dense", "tiny-tied", "tiny-moe"];
const QUANTISED: [&str; 3] = ["tiny-quant/ct-nvfp4", "tiny-quant/modelopt-mixed", "tiny-quant/qwen-fp8-block"];

/// Largest relative L2 error of half of all rows, and of any row.
type Tolerance = (f64, f64);

/// f32 results are within 1e-4 of f64, where logits reach 17, and orders of summation differ by as much again.
const EXACT: Tolerance = (1e-4, 5e-4);
/// With every result rounded to 16 bits, the operations of the CPU backend give medians of 0.005 to 0.013; the worst row is off by
/// 0.03, and by 0.1 where a router decides a near tie otherwise. GPUs round a little more inside operations: twice that.
const ROUNDED: Tolerance = (0.03, 0.25);

/// A file of golden tensors.
struct Golden(Vec<u8>);

impl Golden {
    fn open(model: &str, file: &str) -> Self {
        Self(std::fs::read(tiny_model(model).join(file)).unwrap())
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        file.tensor(name).unwrap_or_else(|_| panic!("{name} is missing")).data().to_vec()
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        self.bytes(name).as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    fn ids(&self, name: &str) -> Vec<u32> {
        self.bytes(name).as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b) as u32).collect()
    }
}

/// Errors of rows, gathered over a model.
struct Errors {
    what: String,
    rows: Vec<(String, f64)>,
}

impl Errors {
    fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), rows: Vec::new() }
    }

    /// Relative L2 error of each row of `width`.
    fn add(&mut self, part: &str, got: &[f32], expected: &[f32], width: usize) {
        assert_eq!(got.len(), expected.len(), "{} {part}", self.what);
        let square = |x: f32| f64::from(x) * f64::from(x);
        for (i, (got, expected)) in got.chunks(width).zip(expected.chunks(width)).enumerate() {
            let error: f64 = got.iter().zip(expected).map(|(a, b)| square(a - b)).sum();
            let size: f64 = expected.iter().copied().map(square).sum();
            let error = (error / size.max(1e-30)).sqrt();
            assert!(error.is_finite(), "{} {part} row {i}: {got:?}", self.what);
            self.rows.push((format!("{part} row {i}"), error));
        }
    }

    fn check<B: InferenceBackend>(mut self, backend: &B) {
        let (median, most) = if is_exact(backend) { EXACT } else { ROUNDED };
        self.rows.sort_by(|a, b| a.1.total_cmp(&b.1));
        let (middle, (place, last)) = (self.rows[self.rows.len() / 2].1, &self.rows[self.rows.len() - 1]);
        let line = format!("{}: median {middle:.1e}, most {last:.1e} at {place} of {}", self.what, self.rows.len());
        println!("{line}");
        assert!(middle <= median && *last <= most, "{line}; {median:.1e} and {most:.1e} are allowed");
    }
}

/// Layers of Gated DeltaNet.
fn recurrent_layers<B: InferenceBackend>(model: &Qwen35<B>) -> Vec<usize> {
    let kinds = model.config().layers.iter().enumerate();
    kinds.filter(|(_, kind)| **kind == LayerKind::LinearAttention).map(|(i, _)| i).collect()
}

/// Adds the convolution windows and recurrent matrices of an image.
fn add_states<B: InferenceBackend>(
    errors: &mut Errors,
    model: &Qwen35<B>,
    image: &LaneImage,
    golden: &Golden,
    prefix: &str,
) {
    let (mut rest, dims) = (image.recurrent(), &model.config().gdn);
    let dtype = model.backend().activation_dtype();
    for layer in recurrent_layers(model) {
        let expected = [".conv", ".state"].map(|part| golden.floats(&format!("{prefix}cache.{layer}{part}")));
        let (window, after) = rest.split_at(expected[0].len() * dtype.size());
        let (matrix, after) = after.split_at(expected[1].len() * DType::F32.size());
        rest = after;
        let all = expected[0].len();
        errors.add(&format!("{prefix}window {layer}"), &floats(dtype, window), &expected[0], all);
        let head = dims.key_dim * dims.value_dim;
        errors.add(&format!("{prefix}state {layer}, head"), &floats(DType::F32, matrix), &expected[1], head);
    }
    assert!(rest.is_empty());
}

fn floats(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::F32 => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        _ => bytes.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
    }
}

/// The last rows of a prompt's logits.
fn last<'a>(all: &'a [f32], expected: &[f32]) -> &'a [f32] {
    &all[all.len() - expected.len()..]
}

fn layers<B: InferenceBackend>(backend: &B, _: Extent) {
    for name in MODELS {
        let (model, golden) = (model(backend, &tiny_model(name), "keep"), Golden::open(name, "golden.safetensors"));
        let (hidden, vocab) = (model.config().hidden, model.vocab());
        let mut s = model.session(&SessionOptions::new(160)).unwrap();
        let ids = golden.ids("input_ids");
        let mut errors = Errors::new(format!("{name}, prompt"));
        let mut lane = open(&mut s, 160);
        let trace = s.trace_prompt(&mut lane, &ids[..37]).unwrap();
        for (i, layer) in trace.layers.iter().enumerate() {
            errors.add(&format!("layer {i}"), layer, &golden.floats(&format!("prefill.layer.{i}")), hidden);
        }
        errors.add("final norm", &trace.final_norm, &golden.floats("prefill.final_norm"), hidden);
        let state = s.snapshot(&mut lane).unwrap();
        add_states(&mut errors, &model, state.image(), &golden, "prefill.");
        drop(lane);
        let mut lane = open(&mut s, 160);
        let logits = prompt_logits(&mut s, &mut lane, &ids[..37]);
        let expected = golden.floats("prefill.logits_last5");
        errors.add("logits", last(&logits, &expected), &expected, vocab);
        // The MTP block: its row s takes the token of position s.
        let mtp = Golden::open(name, "mtp_golden.safetensors");
        let inputs = [&mtp.ids("prompt_ids")[..], &mtp.ids("prefill.token_ids")[36..]].concat();
        drop(lane);
        let mut lane = open(&mut s, 160);
        let trace = s.trace_prompt(&mut lane, &inputs).unwrap();
        errors.add("MTP", &trace.mtp[hidden..], &mtp.floats("prefill.hidden_out"), hidden);
        errors.check(backend);
    }
}

fn steps<B: InferenceBackend>(backend: &B, _: Extent) {
    for name in MODELS {
        let (model, golden) = (model(backend, &tiny_model(name), "keep"), Golden::open(name, "golden.safetensors"));
        let mut s = model.session(&SessionOptions::new(160)).unwrap();
        let ids = golden.ids("input_ids");
        let mut errors = Errors::new(format!("{name}, steps"));
        let mut lane = open(&mut s, 160);
        prefill(&mut s, &mut lane, &ids[..37]);
        for step in 0..5 {
            let logits = round(&mut s, &mut lane, RoundRow::new(ids[37 + step]).with_logits(), 1).logits.unwrap();
            errors.add("logits", &logits, &golden.floats(&format!("step.{step}.logits")), model.vocab());
        }
        let state = s.snapshot(&mut lane).unwrap();
        add_states(&mut errors, &model, state.image(), &golden, "step.4.");
        errors.check(backend);
    }
}

fn long_prompts<B: InferenceBackend>(backend: &B, _: Extent) {
    for name in MODELS {
        let (model, golden) = (model(backend, &tiny_model(name), "keep"), Golden::open(name, "long.safetensors"));
        for chunk in [1024, 64, 67] {
            let mut s = model.session(&SessionOptions::new(160).with_prefill_chunk(chunk)).unwrap();
            let mut errors = Errors::new(format!("{name}, 150 tokens in chunks of {chunk}"));
            let mut lane = open(&mut s, 160);
            let logits = prompt_logits(&mut s, &mut lane, &golden.ids("input_ids"));
            let expected = golden.floats("logits_last5");
            errors.add("logits", last(&logits, &expected), &expected, model.vocab());
            let state = s.snapshot(&mut lane).unwrap();
            add_states(&mut errors, &model, state.image(), &golden, "");
            errors.check(backend);
        }
    }
}

/// As stored, and dequantised by the host first.
fn quantised<B: InferenceBackend>(backend: &B, _: Extent) {
    for name in QUANTISED {
        let golden = Golden::open(name, "golden.safetensors");
        for recipes in ["keep", "f32"] {
            let model = model(backend, &tiny_model(name), recipes);
            let vocab = model.vocab();
            let mut s = model.session(&SessionOptions::new(64)).unwrap();
            let mut lane = open(&mut s, 64);
            let logits = prompt_logits(&mut s, &mut lane, &golden.ids("input_ids"));
            let rows: Vec<f32> =
                golden.ids("rows").iter().flat_map(|&r| logits[r as usize * vocab..][..vocab].to_vec()).collect();
            let mut errors = Errors::new(format!("{name}, {recipes}"));
            errors.add("logits", &rows, &golden.floats("logits"), vocab);
            errors.check(backend);
            // Drafts behind a prompt, where there is an MTP block.
            if model.has_mtp() {
                drop(lane);
                let mut lane = open(&mut s, 64);
                let end = PrefillEnd::Choose { drafts: 3 };
                let out = s.prefill(&mut lane, &golden.ids("input_ids")[..37], end, None).unwrap().unwrap();
                let chosen = [&out.tokens[..], &out.drafts[..]].concat();
                let expected = golden.ids("chosen");
                assert_eq!(chosen.len(), expected.len(), "{name}");
                // The smallest margin is 0.09, less than 16-bit activations may move logits.
                if is_exact(backend) {
                    assert_eq!(chosen, expected, "{name}");
                }
            }
        }
    }
}

/// Experts stored one by one are the fused ones, to the bit.
fn unfused<B: InferenceBackend>(backend: &B, _: Extent) {
    let folder = tempfile::tempdir().unwrap();
    unfuse(&tiny_model("tiny-moe"), folder.path());
    let text = tokens(90, 4, 512);
    let logits = [tiny_model("tiny-moe"), folder.path().to_owned()].map(|dir| {
        let model = model(backend, &dir, "keep");
        let mut s = model.session(&SessionOptions::new(160)).unwrap();
        let mut lane = open(&mut s, 160);
        let mut logits = prompt_logits(&mut s, &mut lane, &text);
        logits.extend(round(&mut s, &mut lane, RoundRow::new(7).with_logits(), 1).logits.unwrap());
        logits
    });
    same_bits("unfused experts", &logits[1], &logits[0]);
}

/// Writes a checkpoint with every fused tensor of experts as one tensor an expert.
fn unfuse(from: &Path, to: &Path) {
    std::fs::copy(from.join("config.json"), to.join("config.json")).unwrap();
    let bytes = std::fs::read(from.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut parts = Vec::new();
    for (name, view) in file.tensors() {
        let split = |suffix: &str| name.strip_suffix(suffix).map(str::to_owned);
        let (base, names): (_, &[&str]) = match (split("experts.gate_up_proj"), split("experts.down_proj")) {
            (Some(base), _) => (base, &["gate_proj", "up_proj"]),
            (_, Some(base)) => (base, &["down_proj"]),
            _ => {
                parts.push((name, view));
                continue;
            }
        };
        let &[experts, rows, cols] = view.shape() else { panic!("{name} has three dimensions") };
        let (rows, data) = (rows / names.len(), view.data());
        let matrix = data.len() / (experts * names.len());
        for (i, data) in data.chunks(matrix).enumerate() {
            let part = format!("{base}experts.{}.{}.weight", i / names.len(), names[i % names.len()]);
            parts.push((part, TensorView::new(view.dtype(), vec![rows, cols], data).unwrap()));
        }
    }
    let written = safetensors::serialize(parts, None).unwrap();
    std::fs::write(to.join("model.safetensors"), written).unwrap();
}

on_every_backend! { layers, steps, long_prompts, quantised, unfused }
