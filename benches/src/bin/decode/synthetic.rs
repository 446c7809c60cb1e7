//! Plain decoding with random weights of a published shape.

use std::time::Instant;

use ninfer_benches::{Random, shape_config};
use ninfer_core::memory::KvFormat;
use ninfer_core::model::{CausalModel, LaneOptions, PrefillEnd, RoundRow};
use ninfer_core::shape::{ModelShape, Role, TensorShape, published};
use ninfer_core::{Backend, DType, WeightFormat, roofline};
use ninfer_examples::table::{Align, Table, grouped};
use ninfer_examples::{Failure, Result};
use ninfer_kernels::cpu::Cpu;
use ninfer_models::qwen35::SyntheticWeights;
use ninfer_models::{Config, Qwen35, SessionOptions};
use serde_json::json;

use crate::{Measured, median};

/// Rounds before the measured ones: the first is also recorded, and memory that is new to the process is touched.
const WARM_UP: usize = 3;

/// What to measure.
pub struct Options<'a> {
    /// Name of a published size.
    pub size: &'a str,
    /// Format of the projections.
    pub format: WeightFormat,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Tokens to decode.
    pub new: usize,
    /// How often they are decoded.
    pub repeat: usize,
}

/// Seconds of one repetition.
struct Run {
    /// All rounds.
    total: f64,
    /// The fastest round.
    best: f64,
}

/// Decodes and compares with a bandwidth in bytes a second.
pub fn measure(cpu: &Cpu, options: &Options<'_>, bandwidth: f64) -> Result<Measured> {
    // MTP plays no part in plain decoding.
    let shape = ModelShape { mtp: false, ..published(options.size)? };
    let source = SyntheticWeights::new(Config::from_json_str(&shape_config(&shape).to_string())?, options.format, 1);
    let model = Qwen35::from_source(cpu, &source, &mut |_| {})?;
    drop(source);

    let context = options.prompt + options.new + WARM_UP + 1;
    let session_options = SessionOptions::new(context).with_max_drafts(0).with_mtp(false);
    let mut session = model.session(&session_options)?;
    let mut runs = Vec::new();
    for _ in 0..options.repeat {
        runs.push(decode(&mut session, options, context)?);
    }

    // A round reads the head in BF16, as the source makes it, and every projection in its format.
    let kv = if cpu.kv_dtypes().first() == Some(&DType::Bf16) { KvFormat::Bf16 } else { KvFormat::F32 };
    let format = |t: &TensorShape| if is_projection(t) { options.format } else { WeightFormat::Bf16 };
    let middle = options.prompt + WARM_UP + options.new / 2;
    let bytes = roofline::bytes_per_token(&shape, format, middle, kv)?;
    let seconds = median(runs.iter().map(|r| r.total).collect()) / options.new as f64;
    let best = runs.iter().map(|r| r.best).fold(f64::INFINITY, f64::min);
    let share = roofline::share(bytes.total(), seconds, bandwidth);

    let mut table =
        Table::new(&[("random weights", Align::Left), (&format!("{} {}", options.size, options.format), Align::Right)]);
    let mut row = |name: &str, value: String| table.row([name.to_owned(), value]);
    row("parameters", grouped(shape.parameters().text()));
    row("weights on the device, GB", format!("{:.3}", model.weight_bytes() as f64 / 1e9));
    row("tokens in front, decoded, times", format!("{}, {}, {}", options.prompt, options.new, options.repeat));
    row("bytes a token, GB", format!("{:.3}", bytes.total() as f64 / 1e9));
    row(
        "of these weights, KV cache, state",
        format!("{:.3}, {:.3}, {:.3}", gb(bytes.weights), gb(bytes.kv), gb(bytes.state)),
    );
    row("tok/s", format!("{:.2}", 1.0 / seconds));
    row("tok/s of the fastest round", format!("{:.2}", 1.0 / best));
    row("tok/s the bandwidth allows", format!("{:.2}", roofline::ceiling(bytes.total(), bandwidth)));
    row("GB/s", format!("{:.2}", gb(bytes.total()) / seconds));
    row("share of the measured bandwidth", format!("{share:.3}"));
    let json = json!({
        "shape": options.size,
        "format": options.format.name(),
        "parameters": shape.parameters().text(),
        "weight_bytes": model.weight_bytes(),
        "prompt_tokens": options.prompt,
        "decoded_tokens": options.new,
        "repetitions": options.repeat,
        "bytes_per_token": bytes,
        "tokens_per_second": 1.0 / seconds,
        "fastest_round_tokens_per_second": 1.0 / best,
        "ceiling_tokens_per_second": roofline::ceiling(bytes.total(), bandwidth),
        "bytes_per_second": bytes.total() as f64 / seconds,
        "bandwidth_share": share,
    });
    Ok(Measured { table: table.to_string(), json })
}

fn gb(bytes: u64) -> f64 {
    bytes as f64 / 1e9
}

/// Whether the source gives a tensor the format that was asked for.
fn is_projection(t: &TensorShape) -> bool {
    let kept =
        matches!(t.role, Role::Embedding | Role::Head | Role::GdnA | Role::GdnB | Role::Router | Role::SharedScale);
    t.role.is_matrix() && !kept
}

/// One lane: a prompt, some rounds to warm up, then the measured ones.
fn decode<M: CausalModel>(session: &mut M, options: &Options<'_>, context: usize) -> Result<Run> {
    let vocab = session.limits().vocab as u32;
    let mut random = Random::new(1);
    let prompt: Vec<u32> = (0..options.prompt).map(|_| random.below(vocab)).collect();
    let mut lane = session.open_lane(&LaneOptions::new(context))?;
    let first = session.prefill(&mut lane, &prompt, PrefillEnd::Choose { drafts: 0 }, None)?;
    let mut anchor = first.and_then(|o| o.tokens.last().copied()).ok_or_else(no_token)?;
    let mut seconds = Vec::with_capacity(options.new);
    for i in 0..WARM_UP + options.new {
        let start = Instant::now();
        let mut lanes = [&mut lane];
        let outcomes = session.verify(&mut lanes, &[RoundRow::new(anchor)])?.commit(&[1])?;
        if i >= WARM_UP {
            seconds.push(start.elapsed().as_secs_f64());
        }
        anchor = outcomes.first().and_then(|o| o.tokens.last().copied()).ok_or_else(no_token)?;
    }
    Ok(Run { total: seconds.iter().sum(), best: seconds.iter().copied().fold(f64::INFINITY, f64::min) })
}

fn no_token() -> Failure {
    Failure::usage("a round emitted no token", "check the session")
}
