//! Shows what a checkpoint holds, what it will need and how fast it can be, without loading it.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use ninfer_core::device::DeviceInfo;
use ninfer_core::memory::{KvFormat, binary_size};
use ninfer_core::shape::{FfnShape, ModelShape};
use ninfer_core::{known, shape, tuning};
use ninfer_examples::arguments::{from, within};
use ninfer_examples::forecast::{self, Forecast, Workload};
use ninfer_examples::formats::Formats;
use ninfer_examples::gpu::Questions;
use ninfer_examples::hardware::{Hardware, Tuned, facts};
use ninfer_examples::inventory::{Inventory, KeepingHeads, keeping_heads};
use ninfer_examples::recipes::Recipes;
use ninfer_examples::table::grouped;
use ninfer_examples::{Failure, Result, arguments, failure, output, shipped};
use ninfer_models::weights::{MtpState, WeightTable};
use serde_json::{Value, json};

/// Context that plans are made for where none is given.
const DEFAULT_CONTEXT: usize = 4096;
/// Drafts that plans are made for where none are given and the model has an MTP block.
const DEFAULT_DRAFTS: usize = 3;
/// Positions that the published sizes are declared for.
const PUBLISHED_POSITIONS: usize = 262_144;

const EXAMPLES: &str = "\
Examples:
  inspect
      The shipped model: configuration, tensors, memory and speed limits on known devices.
  inspect ~/models/Qwen3.6-35B-A3B --device-profile gb10 --context 131072 --lanes 4
      Whether four long sequences fit on a DGX Spark.
  inspect --size 27b --weights nvfp4 --device-profile rtx5090 --device-profile rtx4090
      A published size without a checkpoint, converted to NVFP4.
  inspect --size 35b-a3b --weights q4 --draft-tokens 2 --kv int8-g64
      Four-bit integers, two MTP drafts, an 8-bit KV cache.
  inspect --device --bandwidth
      The devices of this machine, and how fast their memory is.
  inspect --device --kernels
      What the driver of each GPU makes of the kernels of this build.

Only headers and a few small vectors are read.
Exit status: 0, or 1 for an error, or 2 for a command line that is not legal.";

/// Show what a checkpoint or a device is.
#[derive(Debug, Parser)]
#[command(name = "inspect", version, after_help = EXAMPLES)]
struct Arguments {
    /// Folder of a checkpoint [default: the shipped model]
    #[arg(value_name = "DIR", conflicts_with_all = ["size", "device"])]
    dir: Option<PathBuf>,
    /// A published size instead of a checkpoint: 0.8b, 2b, 4b, 9b, 27b, 35b-a3b, 122b-a10b, 397b-a17b
    #[arg(long, value_name = "SIZE", conflicts_with = "device")]
    size: Option<String>,
    /// Show the devices of this machine and their launch sizes instead of a model
    #[arg(long)]
    device: bool,
    /// With --device: measure how fast memory is, for a tenth of a second a device
    #[arg(long, requires = "device")]
    bandwidth: bool,
    /// With --device: have the driver of each GPU compile all kernels, and list them
    #[arg(long, requires = "device")]
    kernels: bool,
    /// A known device to plan for; can be given several times [default: this machine and all that are known]
    #[arg(long, value_name = "NAME")]
    device_profile: Vec<String>,
    /// Formats of the weights: keep, bf16, f32, q4, q5, q6, w8, groupwise, nvfp4, fp8, fp8-block, bridge-fp8, bridge-fp8-block,
    /// bridge-fp8-amax; with -a8 behind one of FP8 also E4M3 activations; or a file of rules, *.toml; or several of them in a row,
    /// separated by commas
    #[arg(long, value_name = "RECIPE", default_value = "keep")]
    weights: Recipes,
    /// Tokens a sequence may reach [default: 4096, or what the model is made for if that is less]
    #[arg(long, value_name = "N", value_parser = from(1))]
    context: Option<usize>,
    /// Sequences at once
    #[arg(long, value_name = "N", value_parser = from(1), default_value = "1")]
    lanes: usize,
    /// MTP drafts a round, 0 for plain decoding [default: 3 where the model has an MTP block]
    #[arg(long, value_name = "K", value_parser = within(0, 15))]
    draft_tokens: Option<usize>,
    /// Storage of the KV cache: f32, bf16, int8-g64 or fp8 [default: bf16, f32 on the processor]
    #[arg(long, value_name = "FORMAT", value_parser = kv_format)]
    kv: Option<KvFormat>,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
}

fn kv_format(text: &str) -> Result<KvFormat, String> {
    let all = [KvFormat::F32, KvFormat::Bf16, KvFormat::Int8G64, KvFormat::Fp8];
    all.into_iter().find(|kv| kv.name() == text).ok_or_else(|| "expected f32, bf16, int8-g64 or fp8".to_owned())
}

fn main() -> ExitCode {
    match arguments::parse::<Arguments>() {
        Ok(arguments) => failure::exit(run(&arguments)),
        Err(status) => status,
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    if arguments.device {
        show_devices(arguments)
    } else if let Some(size) = &arguments.size {
        let shape = shape::published(size).map_err(usage)?;
        show_size(arguments, size, shape)
    } else {
        show_checkpoint(arguments)
    }
}

/// A value of an option that is not legal.
fn usage(error: ninfer_core::Error) -> Failure {
    Failure::usage(error.to_string(), error.help())
}

fn show_devices(arguments: &Arguments) -> Result<()> {
    let questions = Questions { bandwidth: arguments.bandwidth, kernels: arguments.kernels };
    let hardware = Hardware::detect(questions);
    let mut tuned: Vec<Tuned> = hardware.cuda.iter().cloned().map(Tuned::new).collect();
    for name in &arguments.device_profile {
        tuned.push(Tuned::new(known::profile(name).map_err(usage)?.device_info()));
    }
    let chunk = tuning::prefill_chunk(&hardware.cpu, None);
    if arguments.json {
        return output::write_json(&json!({
            "cpu": hardware.cpu,
            "cpu_prefill_chunk": chunk,
            "cuda": hardware.cuda,
            "cuda_answers": hardware.answers,
            "cuda_note": hardware.cuda_note,
            "tuning": tuned,
        }));
    }
    let mut out = format!("CPU   {}\n      prompts in chunks of {} tokens\n", hardware.cpu, grouped(chunk as u64));
    for (i, device) in hardware.cuda.iter().enumerate() {
        out.push_str(&format!("CUDA  {i}: {device}\n{}", facts(device)));
        let Some(answers) = hardware.answers.get(i) else { continue };
        if let Some(read) = answers.read {
            out.push_str(&format!("      reading alone   {read}\n"));
        }
        let words = answers.failure.iter().chain(&answers.notices);
        words.for_each(|words| out.push_str(&format!("      {words}\n")));
        if !answers.kernels.is_empty() {
            out.push_str(&format!("\n{}\n", answers.kernel_table()));
        }
    }
    if let Some(note) = &hardware.cuda_note {
        out.push_str(&format!("CUDA  {note}\n"));
    }
    for t in &tuned {
        out.push_str(&format!("\n{}\n\n{}", t.device, t.table()));
    }
    output::write(&out)
}

fn show_size(arguments: &Arguments, size: &str, shape: ModelShape) -> Result<()> {
    let workload = workload(arguments, shape, Formats::of_release(&arguments.weights), PUBLISHED_POSITIONS)?;
    let forecasts = forecasts(arguments, &workload)?;
    if arguments.json {
        return output::write_json(&json!({
            "size": size,
            "shape": workload.shape,
            "parameters": parameters(&workload.shape),
            "weights": arguments.weights,
            "context": workload.context,
            "lanes": workload.lanes,
            "draft_tokens": workload.drafts,
            "devices": forecasts,
        }));
    }
    let mut out = format!("published size {size}, stored in BF16\n{}\n", summary(&workload.shape));
    out.push_str(&plans(arguments, &workload, &forecasts));
    output::write(&out)
}

fn show_checkpoint(arguments: &Arguments) -> Result<()> {
    let dir = shipped::model_or_shipped(arguments.dir.as_deref())?;
    let table = WeightTable::open(&dir)?;
    let inventory = Inventory::new(&table, &arguments.weights);
    let keeping = keeping_heads(&table)?;
    let formats = Formats::of_checkpoint(&table, &arguments.weights);
    let workload = workload(arguments, table.shape(), formats, table.config().max_positions)?;
    let forecasts = forecasts(arguments, &workload)?;
    let mtp = match table.mtp() {
        MtpState::Complete => "complete",
        MtpState::Absent => "absent",
    };
    if arguments.json {
        return output::write_json(&json!({
            "model": dir,
            "shape": workload.shape,
            "max_positions": workload.max_positions,
            "parameters": parameters(&workload.shape),
            "mtp": mtp,
            "head": if table.shares_head() { "tied" } else { "stored" },
            "non_decaying_heads": keeping,
            "inventory": inventory,
            "weights": arguments.weights,
            "context": workload.context,
            "lanes": workload.lanes,
            "draft_tokens": workload.drafts,
            "devices": forecasts,
        }));
    }
    let mut out = format!("{}\n{}", dir.display(), summary(&workload.shape));
    out.push_str(&format!("context     {} positions\n", grouped(workload.max_positions as u64)));
    out.push_str(&format!("MTP block   {mtp}\n"));
    out.push_str(&format!("A_log       {}\n\n", heads(&keeping)));
    out.push_str(&inventory.table().to_string());
    out.push_str(&format!(
        "\n{} parameters in {} tensors, {} stored, {} loaded as `{}`\n\n",
        grouped(inventory.parameters),
        grouped(inventory.groups.iter().map(|g| g.count as u64).sum()),
        binary_size(inventory.bytes),
        binary_size(inventory.loaded_bytes),
        arguments.weights,
    ));
    out.push_str(&plans(arguments, &workload, &forecasts));
    output::write(&out)
}

fn heads(keeping: &[KeepingHeads]) -> String {
    if keeping.is_empty() {
        return "every Gated DeltaNet head decays".to_owned();
    }
    let list: Vec<String> = keeping.iter().map(|k| format!("layer {}: {:?}", k.layer, k.heads)).collect();
    format!("−∞, which never decays, in heads of {}", list.join(", "))
}

fn parameters(shape: &ModelShape) -> Value {
    let p = shape.parameters();
    json!({ "text": p.text(), "mtp": p.mtp, "total": p.total(), "layers_per_token": p.layers_per_token })
}

fn summary(shape: &ModelShape) -> String {
    let (a, g, p) = (&shape.attention, &shape.gdn, shape.parameters());
    let ffn = match shape.ffn {
        FfnShape::Dense { intermediate } => format!("SwiGLU of width {intermediate}"),
        FfnShape::Moe { experts, top_k, width, shared_width } => {
            format!("{experts} experts of width {width}, {top_k} a token, and a shared one of width {shared_width}")
        }
        _ => "of another kind".to_owned(),
    };
    format!(
        "layers      {}: {} Gated DeltaNet, {} full attention; width {}\n\
         attention   {} query heads, {} KV heads of {}\n\
         DeltaNet    {} key heads of {}, {} value heads of {}, convolution {}\n\
         ffn         {ffn}\n\
         vocabulary  {}, head {}\n\
         parameters  {}, {} of the layers used for a token; MTP block {}\n",
        shape.layers.len(),
        shape.gdn_layers(),
        shape.full_layers(),
        shape.hidden,
        a.query_heads,
        a.kv_heads,
        a.head_dim,
        g.key_heads,
        g.key_dim,
        g.value_heads,
        g.value_dim,
        g.conv_kernel,
        grouped(shape.vocab as u64),
        if shape.tied { "tied to the embedding" } else { "of its own" },
        grouped(p.text()),
        grouped(p.layers_per_token),
        if shape.mtp { grouped(p.mtp) } else { "absent".to_owned() },
    )
}

fn workload(arguments: &Arguments, shape: ModelShape, formats: Formats, max_positions: usize) -> Result<Workload> {
    let drafts = arguments.draft_tokens.unwrap_or(if shape.mtp { DEFAULT_DRAFTS } else { 0 });
    let context = arguments.context.unwrap_or(DEFAULT_CONTEXT.min(max_positions).max(1));
    Ok(Workload { shape, formats, max_positions, context, lanes: arguments.lanes, drafts, kv: arguments.kv })
}

/// The devices asked for, else this machine and the known ones.
fn forecasts(arguments: &Arguments, workload: &Workload) -> Result<Vec<Forecast>> {
    let mut devices: Vec<(String, DeviceInfo)> = Vec::new();
    if arguments.device_profile.is_empty() {
        let hardware = Hardware::detect(Questions { bandwidth: true, kernels: false });
        devices.push(("this CPU".to_owned(), hardware.cpu));
        for (i, device) in hardware.cuda.into_iter().enumerate() {
            devices.push((format!("this cuda:{i}"), device));
        }
        devices.extend(known::DEVICES.iter().map(|d| (d.profile.to_owned(), d.device_info())));
    }
    for name in &arguments.device_profile {
        let device = known::profile(name).map_err(usage)?;
        devices.push((device.profile.to_owned(), device.device_info()));
    }
    devices.iter().map(|(name, device)| workload.forecast(name, device)).collect()
}

fn plans(arguments: &Arguments, workload: &Workload, forecasts: &[Forecast]) -> String {
    format!(
        "Plan for {} of {} tokens with {} drafts a round, weights as `{}`:\n\n{}\n{}\n\
         Speeds are ceilings for one sequence: the bandwidth over the bytes that must move.\n",
        if workload.lanes == 1 { "one sequence".to_owned() } else { format!("{} sequences", workload.lanes) },
        grouped(workload.context as u64),
        workload.drafts,
        arguments.weights,
        forecast::memory_table(forecasts),
        forecast::device_table(forecasts),
    )
}
