//! Weights go to a device tensor by tensor: the host never holds more than two of the largest and what loading works with.
//!
//! A test program of its own with one test, since it measures the memory of its process.

#![cfg(target_os = "linux")]

use std::path::Path;

use ninfer_core::backend::InferenceBackend;
use ninfer_core::model::{CausalModel, LaneOptions, PrefillEnd};
use ninfer_core::{DType, memory::binary_size};
use ninfer_examples::loader::load;
use ninfer_examples::progress::Progress;
use ninfer_kernels::cpu::Cpu;
use ninfer_models::SessionOptions;
use ninfer_models::checkpoint::{CheckpointWriter, NewTensor};
use ninfer_models::weights::{EntryRole, ExpertPart, LayerRef, WeightTable};
use ninfer_quant::TensorRole;
use serde_json::json;

/// Memory of the host, over that of the largest tensors: two stages of pinned memory of 32 MiB each, parts of tensors that are being
/// converted, and what the driver takes to compile and run the kernels that pack.
const SPARE: u64 = 256 << 20;

/// The same without a device: experts are read and converted one by one on each thread.
const READING: u64 = 32 << 20;

/// A model of three layers of Gated DeltaNet and one of attention, over and over, with a tied head and no MTP block.
#[derive(Clone, Copy)]
struct Shape {
    hidden: usize,
    vocab: usize,
    layers: usize,
    ffn: Ffn,
}

#[derive(Clone, Copy)]
enum Ffn {
    /// Their width.
    Dense(usize),
    /// How many, and their width.
    Experts(usize, usize),
}

const HEAD: usize = 64;
const KEY_HEADS: usize = 2;
const VALUE_HEADS: usize = 4;

impl Shape {
    fn config(&self) -> String {
        let mut config = json!({
            "model_type": "qwen3_5_text",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "vocab_size": self.vocab,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": HEAD,
            "linear_num_key_heads": KEY_HEADS,
            "linear_num_value_heads": VALUE_HEADS,
            "linear_key_head_dim": HEAD,
            "linear_value_head_dim": HEAD,
            "rope_parameters": { "rope_theta": 1e7 },
            "tie_word_embeddings": true,
            "mtp_num_hidden_layers": 0,
        });
        match self.ffn {
            Ffn::Dense(width) => config["intermediate_size"] = width.into(),
            Ffn::Experts(experts, width) => {
                config["model_type"] = "qwen3_5_moe_text".into();
                config["num_experts"] = experts.into();
                config["num_experts_per_tok"] = 2.into();
                config["moe_intermediate_size"] = width.into();
                config["shared_expert_intermediate_size"] = width.into();
            }
        }
        config.to_string()
    }

    /// Every tensor, in BF16.
    fn tensors(&self) -> Vec<NewTensor> {
        let (h, keys, values) = (self.hidden, KEY_HEADS * HEAD, VALUE_HEADS * HEAD);
        let channels = 2 * keys + values;
        let mut all = Vec::new();
        let mut add = |name: String, shape: &[usize]| all.push(NewTensor::new(name, DType::Bf16, shape));
        add("model.embed_tokens.weight".into(), &[self.vocab, h]);
        add("model.norm.weight".into(), &[h]);
        for i in 0..self.layers {
            let mut part = |name: &str, shape: &[usize]| add(format!("model.layers.{i}.{name}"), shape);
            part("input_layernorm.weight", &[h]);
            part("post_attention_layernorm.weight", &[h]);
            if i % 4 == 3 {
                part("self_attn.q_proj.weight", &[8 * HEAD, h]);
                part("self_attn.k_proj.weight", &[2 * HEAD, h]);
                part("self_attn.v_proj.weight", &[2 * HEAD, h]);
                part("self_attn.o_proj.weight", &[h, 4 * HEAD]);
                part("self_attn.q_norm.weight", &[HEAD]);
                part("self_attn.k_norm.weight", &[HEAD]);
            } else {
                part("linear_attn.in_proj_qkv.weight", &[channels, h]);
                part("linear_attn.in_proj_z.weight", &[values, h]);
                part("linear_attn.in_proj_a.weight", &[VALUE_HEADS, h]);
                part("linear_attn.in_proj_b.weight", &[VALUE_HEADS, h]);
                part("linear_attn.out_proj.weight", &[h, values]);
                part("linear_attn.conv1d.weight", &[channels, 1, 4]);
                part("linear_attn.A_log", &[VALUE_HEADS]);
                part("linear_attn.dt_bias", &[VALUE_HEADS]);
                part("linear_attn.norm.weight", &[HEAD]);
            }
            match self.ffn {
                Ffn::Dense(width) => {
                    part("mlp.gate_proj.weight", &[width, h]);
                    part("mlp.up_proj.weight", &[width, h]);
                    part("mlp.down_proj.weight", &[h, width]);
                }
                Ffn::Experts(experts, width) => {
                    part("mlp.gate.weight", &[experts, h]);
                    part("mlp.shared_expert_gate.weight", &[1, h]);
                    part("mlp.experts.gate_up_proj", &[experts, 2 * width, h]);
                    part("mlp.experts.down_proj", &[experts, h, width]);
                    part("mlp.shared_expert.gate_proj.weight", &[width, h]);
                    part("mlp.shared_expert.up_proj.weight", &[width, h]);
                    part("mlp.shared_expert.down_proj.weight", &[h, width]);
                }
            }
        }
        all
    }

    /// Writes the checkpoint; bytes of all tensors and of the largest.
    fn write(&self, folder: &Path) -> (u64, u64) {
        std::fs::write(folder.join("config.json"), self.config()).unwrap();
        let tensors = self.tensors();
        let mut writer = CheckpointWriter::create(folder, &tensors, u64::MAX).unwrap();
        // Values of both signs between 2^-7 and 2^-6.
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut block = vec![0u8; 1 << 20];
        for value in block.as_chunks_mut::<2>().0 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            *value = ((state >> 40) as u16 & 0x807f | 0x3c00).to_le_bytes();
        }
        for (i, tensor) in tensors.iter().enumerate() {
            let mut at = 0;
            while at < tensor.bytes() {
                let bytes = (tensor.bytes() - at).min(block.len() as u64);
                writer.write(i, at, &block[..bytes as usize]).unwrap();
                at += bytes;
            }
        }
        writer.finish().unwrap();
        (tensors.iter().map(NewTensor::bytes).sum(), tensors.iter().map(NewTensor::bytes).max().unwrap())
    }
}

/// Bytes of a line of `/proc/self/status`.
fn status(key: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix(key))?;
    line.trim_start_matches(':').trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

/// The most memory that this process has during a piece of work, and its result. `None` where the system does not tell.
fn measure<T>(work: impl FnOnce() -> T) -> (Option<u64>, T) {
    // Sets the peak to what is in use now; where that is not allowed, an earlier peak counts, which is on the safe side.
    let _ = std::fs::write("/proc/self/clear_refs", "5");
    let result = work();
    (status("VmHWM"), result)
}

/// Writes, loads and runs a checkpoint; bytes of its tensors, of the largest, and the most memory of this process while it loads.
fn stream<B: InferenceBackend>(backend: &B, shape: &Shape, recipes: &str) -> (u64, u64, Option<u64>) {
    let folder = tempfile::tempdir().unwrap();
    let (all, largest) = shape.write(folder.path());
    let recipes = recipes.parse().unwrap();
    let (memory, model) = measure(|| {
        let table = WeightTable::open(folder.path()).unwrap();
        load(backend, &table, &recipes, true, Progress::new(false)).unwrap()
    });
    let size = |bytes: u64| binary_size(bytes);
    println!(
        "{recipes}: {} of tensors, largest {}, {} on the device; at most {} of the host",
        size(all),
        size(largest),
        size(model.weight_bytes() as u64),
        memory.map_or("unknown".to_owned(), size),
    );
    let mut session = model.session(&SessionOptions::new(64)).unwrap();
    let mut lane = session.open_lane(&LaneOptions::new(64)).unwrap();
    let mut finite = true;
    let mut sink = |_: usize, rows: &[f32]| {
        finite &= rows.iter().all(|x| x.is_finite());
        Ok(())
    };
    session.prefill(&mut lane, &[1, 2, 3], PrefillEnd::Choose { drafts: 0 }, Some(&mut sink)).unwrap();
    assert!(finite, "{recipes}: the model computes");
    (all, largest, memory)
}

#[test]
fn the_host_holds_one_weight_at_a_time() {
    // In this order: what is freed stays with the process, and the next one must not profit from that.
    what_stays_on_the_host_is_seen();
    #[cfg(feature = "cuda")]
    weights_pass_through_the_host();
    reading_holds_one_weight_at_a_time();
}

/// The processor is the device, so all weights must show in the measurement.
fn what_stays_on_the_host_is_seen() {
    let shape = Shape { hidden: 256, vocab: 8192, layers: 8, ffn: Ffn::Dense(1024) };
    let before = status("VmRSS");
    let (all, _, most) = stream(&Cpu::new(), &shape, "keep");
    if let Some((most, before)) = most.zip(before) {
        let growth = most.saturating_sub(before);
        assert!(growth > all * 9 / 10, "{growth} bytes more for {all} bytes of weights");
    }
}

#[cfg(feature = "cuda")]
fn weights_pass_through_the_host() {
    use std::io::Write;

    let gpu = match ninfer_kernels::cuda::Cuda::new(0) {
        Ok(gpu) => gpu,
        Err(reason) => {
            let _ = writeln!(std::io::stderr(), "GPU test skipped (1 so far): {reason}");
            return;
        }
    };
    let before = status("VmRSS");
    println!("{} before the first load", before.map_or("unknown".to_owned(), binary_size));
    // 64 MiB of embedding, and 900 MiB or so in all: far more than the host may hold.
    let dense = Shape { hidden: 1024, vocab: 32_768, layers: 16, ffn: Ffn::Dense(8192) };
    // 64 MiB of gate and up of 32 experts.
    let experts = Shape { hidden: 1024, vocab: 16_384, layers: 8, ffn: Ffn::Experts(32, 512) };
    for (shape, recipes) in
        [(dense, "keep"), (dense, "groupwise"), (dense, "fp8"), (experts, "keep"), (experts, "nvfp4")]
    {
        let (all, largest, most) = stream(&gpu, &shape, recipes);
        let limit = 2 * largest + SPARE;
        assert!(all > limit + (128 << 20), "the limit says something");
        if let Some((most, before)) = most.zip(before) {
            // What an earlier load left behind counts as well.
            let growth = most.saturating_sub(before);
            assert!(growth <= limit, "{recipes}: {growth} bytes more, at most {limit}");
        }
    }
}

/// What a loader asks for, without a device to give it to: reading and converting keep nothing either.
fn reading_holds_one_weight_at_a_time() {
    let dense = Shape { hidden: 1024, vocab: 16_384, layers: 12, ffn: Ffn::Dense(8192) };
    let experts = Shape { hidden: 1024, vocab: 8192, layers: 6, ffn: Ffn::Experts(32, 512) };
    for (shape, recipe) in [(dense, "keep"), (dense, "groupwise"), (experts, "keep"), (experts, "q4")] {
        let folder = tempfile::tempdir().unwrap();
        let (all, largest) = shape.write(folder.path());
        let table = WeightTable::open(folder.path()).unwrap();
        let recipe = recipe.parse().unwrap();
        let before = status("VmRSS");
        let (most, ()) = measure(|| {
            for entry in table.entries() {
                match entry.role {
                    EntryRole::Matrix(TensorRole::ExpertGate | TensorRole::ExpertUp | TensorRole::ExpertDown) => {}
                    EntryRole::Matrix(role) => drop(table.stack(entry.layer, role, &recipe).unwrap()),
                    EntryRole::Vector(role) => drop(table.vector(entry.layer, role).unwrap()),
                    other => panic!("{other}"),
                }
            }
            let layers = if matches!(shape.ffn, Ffn::Experts(..)) { shape.layers } else { 0 };
            for layer in (0..layers).map(LayerRef::Main) {
                for part in [ExpertPart::GateUp, ExpertPart::Down] {
                    drop(table.experts(layer, part, &recipe).unwrap());
                }
            }
        });
        if let Some((most, before)) = most.zip(before) {
            let (growth, limit) = (most.saturating_sub(before), 2 * largest + READING);
            println!("{recipe}: {} of {} at a time", binary_size(growth), binary_size(all));
            assert!(growth <= limit, "{recipe}: {growth} bytes more, at most {limit}");
            assert!(all > 2 * limit, "the limit says something");
        }
    }
}
