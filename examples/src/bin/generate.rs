//! Answers a prompt: the shortest way through the whole engine, from a folder of files to streamed text.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use ninfer_core::backend::InferenceBackend;
use ninfer_core::memory::{KvFormat, MemoryPlan, PlanOptions, binary_size, plan};
use ninfer_core::sampling::SamplingParams;
use ninfer_core::{DType, WeightFormat, tuning};
use ninfer_examples::arguments::{from, within};
use ninfer_examples::device::{DeviceChoice, Work};
use ninfer_examples::loader::load;
use ninfer_examples::progress::Progress;
use ninfer_examples::prompt::{DEFAULT_QUESTION, PromptArguments};
use ninfer_examples::recipes::Recipes;
use ninfer_examples::reply::{Finished, Reply};
use ninfer_examples::sampling::SamplingArguments;
use ninfer_examples::speculation::{Speculation, SpeculationArguments};
use ninfer_examples::{Failure, Result, arguments, failure, output, shipped};
use ninfer_models::SessionOptions;
use ninfer_models::text::{StopStrings, Text};
use ninfer_models::weights::{MtpState, WeightTable};
use ninfer_spec::{Answer, FinishReason, Generator, Options};
use serde_json::{Map, Value, json};

/// Tokens of an answer where neither an option nor the checkpoint says how many.
const DEFAULT_MAX_NEW: usize = 256;
/// Prompts from here on get a progress bar: more than one chunk.
const LONG_PROMPT: usize = 1024;

const EXAMPLES: &str = "\
Examples:
  generate
      The shipped model answers a question about `Vec::push`.
  generate --prompt 'What is `Option::map`?' --greedy
      Another question, always the most likely token.
  generate --raw 'fn main() {' --max-new 64 --spec off
      Continue text without a chat template, without speculation.
  generate --model ~/models/Qwen3.5-4B --messages chat.json --thinking on --max-new 2048
      Another checkpoint, a conversation of several turns.
  generate --prompt 'Explain E0499.' --spec ngram --draft-tokens 8 --json
      One JSON object with text, token ids and statistics.
  generate --weights nvfp4,bridge-fp8 --seed 7
      Convert the weights while loading; another random text.

The text goes to standard output and everything else to standard error.
Exit status: 0, or 1 for an error, or 2 for a command line that is not legal.";

/// Answer a prompt with a model of the Qwen3.5 family.
#[derive(Debug, Parser)]
#[command(name = "generate", version, after_help = EXAMPLES)]
struct Arguments {
    /// Folder of a checkpoint [default: the shipped model]
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    #[command(flatten)]
    prompt: PromptArguments,
    #[command(flatten)]
    sampling: SamplingArguments,
    #[command(flatten)]
    speculation: SpeculationArguments,
    /// Most tokens of the answer [default: that of generation_config.json, else 256]
    #[arg(long, value_name = "N", help_heading = "Length")]
    max_new: Option<usize>,
    /// Most positions of prompt and answer; the last token of an answer takes none [default: what both need]
    #[arg(long, value_name = "N", value_parser = from(2), help_heading = "Length")]
    max_context: Option<usize>,
    /// Text that ends the answer, and is left out of it; can be given several times
    #[arg(long, value_name = "TEXT", help_heading = "Length", allow_hyphen_values = true)]
    stop: Vec<String>,
    /// Go on behind the model's stop tokens
    #[arg(long, help_heading = "Length")]
    ignore_eos: bool,
    /// Where to run: auto, cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto", help_heading = "Engine")]
    device: DeviceChoice,
    /// Threads of the CPU backend [default: all]
    #[arg(long, value_name = "N", help_heading = "Engine")]
    threads: Option<usize>,
    /// Formats of the weights: keep, bf16, f32, q4, q5, q6, w8, groupwise, nvfp4, fp8, fp8-block, bridge-fp8, bridge-fp8-block,
    /// bridge-fp8-amax; with -a8 behind one of FP8 also E4M3 activations; or a file of rules, *.toml; or several of them in a row,
    /// separated by commas
    #[arg(long, value_name = "RECIPE", default_value = "keep", help_heading = "Engine")]
    weights: Recipes,
    /// Format of the KV cache: f32, bf16, int8 or fp8 [default: the backend's]
    #[arg(long, value_name = "TYPE", value_parser = kv_dtype, help_heading = "Engine")]
    kv_dtype: Option<DType>,
    /// Prompt tokens to compute at once, rounded up to a multiple of 64; changes no result [default: fits the device]
    #[arg(long, value_name = "N", value_parser = within(1, 1 << 16), help_heading = "Engine")]
    prefill_chunk: Option<usize>,
    /// Print the ids of prompt and answer
    #[arg(long, help_heading = "Output")]
    print_token_ids: bool,
    /// Print one JSON object instead of text and tables
    #[arg(long, help_heading = "Output")]
    json: bool,
    /// Print the text only: no progress, question or statistics
    #[arg(long, help_heading = "Output")]
    quiet: bool,
}

fn kv_dtype(text: &str) -> Result<DType, String> {
    match text {
        "f32" => Ok(DType::F32),
        "bf16" => Ok(DType::Bf16),
        "int8" => Ok(DType::I8),
        "fp8" => Ok(DType::F8E4M3),
        _ => Err("expected f32, bf16, int8 or fp8".to_owned()),
    }
}

fn main() -> ExitCode {
    match arguments::parse::<Arguments>() {
        Ok(arguments) => failure::exit(run(&arguments)),
        Err(status) => status,
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    arguments.device.open(arguments.threads)?.run(arguments)
}

impl Work for &Arguments {
    fn run<B: InferenceBackend>(self, backend: &B) -> Result<()> {
        answer(backend, self)
    }
}

/// The same for every backend: prompt, weights, session, generator, text.
fn answer<B: InferenceBackend>(backend: &B, arguments: &Arguments) -> Result<()> {
    let progress = Progress::new(!arguments.json && !arguments.quiet);
    let dir = shipped::model_or_shipped(arguments.model.as_deref())?;

    // What is cheap to check comes first: options, prompt, headers of the weight files.
    let stop_strings = StopStrings::new(arguments.stop.iter().cloned())
        .map_err(|error| Failure::usage(error.to_string(), error.help()))?;
    let table = WeightTable::open(&dir)?;
    let text = Text::load(&dir)?;
    let prompt = arguments.prompt.encode(&text)?;
    let sampling = arguments.sampling.params(text.defaults())?;
    let speculation = arguments.speculation.settle(table.mtp() == MtpState::Complete)?;
    let length = Length::settle(arguments, &text, &table, prompt.len(), &speculation)?;

    let model = load(backend, &table, &arguments.weights, speculation.uses_mtp(), progress)?;
    let chunk = tuning::prefill_chunk(backend.device(), arguments.prefill_chunk);
    let mut session_options = SessionOptions::new(length.context)
        .with_max_drafts(speculation.most)
        .with_mtp(speculation.uses_mtp())
        .with_prefill_chunk(chunk)
        .with_token_limit(text.tokenizer().len());
    if let Some(dtype) = arguments.kv_dtype {
        session_options = session_options.with_kv_dtype(dtype);
    }
    let mut session = model.session(&session_options)?;

    let stop_tokens = if arguments.ignore_eos { &[] } else { text.stop_tokens().ids() };
    let options = Options::new()
        .with_max_new(length.max_new)
        .with_sampling(sampling)
        .with_stop(stop_tokens)
        .with_prefill_chunk(chunk);
    let bar = if prompt.len() >= LONG_PROMPT { progress } else { Progress::new(false) };
    let bar = bar.bar("prefill", prompt.len() as u64, "tokens");
    let mut generator = Generator::new(&mut session, speculation.apply(options)?)?.with_progress(move |done, total| {
        bar.set_position(done as u64);
        if done >= total {
            bar.finish_and_clear();
        }
    });

    if !arguments.json && !arguments.quiet && arguments.prompt.is_default() {
        output::remark(&format!("> {DEFAULT_QUESTION}\n"));
    }
    let mut reply = Reply::new(&text, &stop_strings, stop_tokens, !arguments.json);
    let mut answer = generator.generate(&prompt, |tokens| reply.license(tokens))?;
    let reply = reply.finish()?;

    // Whatever the rounds were, the tokens of the answer are those of its text.
    answer.tokens.truncate(reply.kept_tokens.unwrap_or(usize::MAX));
    answer.statistics.notes.extend(speculation.note.map(str::to_owned));
    let memory = memory(&table, backend, &session_options, model.weight_bytes())?;
    let report = Report { prompt: &prompt, answer: &answer, reply: &reply, sampling, memory };
    report.print(arguments)
}

/// How long things may become.
struct Length {
    max_new: usize,
    context: usize,
}

impl Length {
    fn settle(
        arguments: &Arguments,
        text: &Text,
        table: &WeightTable,
        prompt: usize,
        speculation: &Speculation,
    ) -> Result<Self> {
        let published = text.defaults().max_new_tokens.and_then(|n| usize::try_from(n).ok()).filter(|&n| n > 0);
        let max_new = arguments.max_new.or(published).unwrap_or(DEFAULT_MAX_NEW);
        if max_new == 0 {
            return Err(Failure::usage("--max-new is 0", "ask for at least one token"));
        }
        let limit = table.config().max_positions.max(2);
        // Drafts of the last rounds need some room too.
        let needed = prompt.saturating_add(max_new).saturating_add(2 * speculation.most);
        let context = arguments.max_context.unwrap_or(needed.min(limit)).max(2);
        if context > limit {
            let message = format!("--max-context is {context}, the model is made for {limit} positions");
            return Err(Failure::usage(message, format!("give at most {limit}")));
        }
        if prompt > context {
            return Err(ninfer_core::Error::ContextOverflow { requested: prompt, limit: context }.into());
        }
        Ok(Self { max_new, context })
    }
}

/// What the session occupies: its options as a plan, with the weights as they were loaded.
fn memory<B: InferenceBackend>(
    table: &WeightTable,
    backend: &B,
    options: &SessionOptions,
    weight_bytes: usize,
) -> Result<MemoryPlan> {
    let dtype = options.kv_dtype.or(backend.kv_dtypes().first().copied());
    let kv = dtype.and_then(KvFormat::of).unwrap_or(KvFormat::F32);
    let asked = PlanOptions::new(options.max_context)
        .with_lanes(options.lanes)
        .with_draft_window(options.max_drafts)
        .with_mtp(options.mtp)
        .with_kv(kv)
        .with_activation(backend.activation_dtype())
        .with_prefill_chunk(options.prefill_chunk);
    let mut planned = plan(&table.shape(), |_| WeightFormat::Bf16, &asked)?;
    planned.weights = weight_bytes as u64;
    planned.mtp_weights = 0;
    Ok(planned)
}

/// Everything there is to tell about an answer.
struct Report<'a> {
    prompt: &'a [u32],
    answer: &'a Answer,
    reply: &'a Finished,
    sampling: SamplingParams,
    memory: MemoryPlan,
}

impl Report<'_> {
    fn print(&self, arguments: &Arguments) -> Result<()> {
        if arguments.json {
            return output::write_json(&self.json());
        }
        if arguments.print_token_ids {
            output::remark(&format!("prompt ids: {:?}\nanswer ids: {:?}", self.prompt, self.answer.tokens));
        }
        if !arguments.quiet {
            output::remark(&self.table());
        }
        Ok(())
    }

    fn json(&self) -> Value {
        let mut fields = Map::new();
        fields.insert("prompt_token_ids".to_owned(), json!(self.prompt));
        fields.insert("token_ids".to_owned(), json!(self.answer.tokens));
        fields.insert("text".to_owned(), json!(self.reply.text));
        fields.insert("finish_reason".to_owned(), json!(finish_reason(self.answer.finish)));
        fields.insert("stop_string".to_owned(), json!(self.reply.stop_string));
        fields.insert("sampling".to_owned(), json!(self.sampling));
        fields.insert("stats".to_owned(), json!(self.answer.statistics));
        fields.insert(
            "memory".to_owned(),
            json!({ "weights": self.memory.weights, "kv": self.kv(), "state": self.state() }),
        );
        Value::Object(fields)
    }

    fn table(&self) -> String {
        let line = |name: &str, value: String| format!("{name:<14}{value}\n");
        let memory = format!(
            "weights {}, KV cache {}, recurrent state {}",
            binary_size(self.memory.weights),
            binary_size(self.kv()),
            binary_size(self.state())
        );
        let mut table = String::from("\n");
        table.push_str(&line("prompt", format!("{} tokens", self.prompt.len())));
        table.push_str(&line(
            "answer",
            format!("{} tokens, ended by {}", self.answer.tokens.len(), finish_reason(self.answer.finish)),
        ));
        table.push_str(&self.answer.statistics.to_string());
        table.push_str(&line("memory", memory));
        table
    }

    fn kv(&self) -> u64 {
        self.memory.kv + self.memory.mtp_kv
    }

    fn state(&self) -> u64 {
        self.memory.recurrent + self.memory.conv + self.memory.records
    }
}

/// A stop string ends an answer like a stop token.
fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop | FinishReason::License => "stop",
        FinishReason::Length => "length",
        FinishReason::ContextLimit => "context",
        _ => "cancelled",
    }
}
