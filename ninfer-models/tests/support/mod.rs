//! Small models and the loops that drive them, shared by the session tests.

#![allow(dead_code, unreachable_pub)]

use ninfer_core::WeightFormat;
use ninfer_core::model::{CausalModel, LaneOptions, PrefillEnd, RoundRow};
use ninfer_core::state::{Committed, Outcome};
use ninfer_kernels::cpu::Cpu;
use ninfer_models::config::Config;
use ninfer_models::qwen35::{Qwen35, SyntheticWeights};
use ninfer_models::session::{Lane, Session, SessionOptions};

/// A small dense or MoE configuration with every kind of layer and an MTP block.
pub fn config(moe: bool) -> Config {
    let ffn = if moe {
        r#""num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
           "shared_expert_intermediate_size": 48"#
    } else {
        r#""intermediate_size": 96"#
    };
    let model_type = if moe { "qwen3_5_moe_text" } else { "qwen3_5_text" };
    let text = format!(
        r#"{{"model_type": "{model_type}", "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 320,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            "rope_parameters": {{"rope_theta": 1e7}}, "tie_word_embeddings": true,
            "mtp_num_hidden_layers": 1, {ffn}}}"#
    );
    Config::from_json_str(&text).expect("the configuration is legal")
}

pub fn synthetic(moe: bool, format: WeightFormat) -> Qwen35<Cpu> {
    let source = SyntheticWeights::new(config(moe), format, 7);
    Qwen35::from_source(&Cpu::new(), &source, &mut |_| {}).expect("synthetic weights load")
}

pub fn session(model: &Qwen35<Cpu>, options: SessionOptions) -> Session<Cpu> {
    model.session(&options).expect("the session opens")
}

/// A prompt that is the same everywhere.
pub fn prompt(len: usize, vocab: u32) -> Vec<u32> {
    (0..len as u32).map(|i| (i * 37 + i * i * 11 + 5) % vocab).collect()
}

pub fn open(session: &mut Session<Cpu>, capacity: usize) -> Committed<Lane> {
    session.open_lane(&LaneOptions::new(capacity)).expect("a lane is free")
}

/// Prefills and returns the chosen token and drafts.
pub fn start(session: &mut Session<Cpu>, lane: &mut Committed<Lane>, prompt: &[u32], drafts: usize) -> Outcome {
    session
        .prefill(lane, prompt, PrefillEnd::Choose { drafts }, None)
        .expect("prefill runs")
        .expect("a token was asked for")
}

/// One round of a single lane; commits everything that was emitted.
pub fn round(session: &mut Session<Cpu>, lane: &mut Committed<Lane>, row: RoundRow<'_>) -> Outcome {
    let mut lanes = [lane];
    let round = session.verify(&mut lanes, &[row]).expect("the round runs");
    let n = round.outcomes()[0].tokens.len();
    round.commit(&[n]).expect("everything emitted can be committed").remove(0)
}

/// Plain greedy decoding.
pub fn greedy(session: &mut Session<Cpu>, prompt: &[u32], count: usize) -> Vec<u32> {
    let mut lane = open(session, prompt.len() + count + 1);
    let mut tokens = start(session, &mut lane, prompt, 0).tokens.to_vec();
    while tokens.len() < count {
        let row = RoundRow::new(tokens[tokens.len() - 1]);
        tokens.extend_from_slice(&round(session, &mut lane, row).tokens);
    }
    tokens
}

/// Logits of every position of a text, in the prompt profile.
pub fn prompt_logits(session: &mut Session<Cpu>, lane: &mut Committed<Lane>, tokens: &[u32]) -> Vec<f32> {
    let mut all = Vec::new();
    let mut sink = |_: usize, values: &[f32]| {
        all.extend_from_slice(values);
        Ok(())
    };
    session.prefill(lane, tokens, PrefillEnd::More, Some(&mut sink)).expect("prefill runs");
    all
}
