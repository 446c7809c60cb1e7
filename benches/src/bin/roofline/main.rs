//! A whole model of a published shape on a GPU, with random weights made there, against what the device can deliver.
//!
//! ```sh
//! cargo run --release -p ninfer-benches --features cuda --bin roofline -- --model 35b-a3b --prompt 7680 --new 256
//! ```
//!
//! Prefill, plain decoding and rounds of drafts by MTP. With random weights acceptance means nothing, so the bench says
//! how many tokens of a round count: a coin of the given probability for each draft, until the first that fails.

#![allow(unreachable_pub, reason = "a program has no outside: `pub` means the whole of it")]

mod arguments;
mod breakdown;
mod ceilings;
mod compare;
mod measure;
mod report;

use std::time::Instant;

use ninfer_benches::shape_config;
use ninfer_core::roofline::{self, RoundOptions, expected_distinct_experts};
use ninfer_core::shape::{ModelShape, Part, published};
use ninfer_core::{Backend, Error, WeightFormat, tuning};
use ninfer_examples::{Failure, Result, arguments as command_line, failure, output};
use ninfer_kernels::cuda::Cuda;
use ninfer_models::qwen35::SyntheticWeights;
use ninfer_models::{Config, Qwen35};

use arguments::{Arguments, Chunk, Kv};
use breakdown::Breakdown;
use measure::{Rounds, Sequence, Setting};
use report::{Kind, Report, Row};

fn main() -> std::process::ExitCode {
    match command_line::parse::<Arguments>() {
        Ok(arguments) => failure::exit(run(&arguments)),
        Err(status) => status,
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    arguments.check()?;
    // Before anything is measured for nothing.
    let earlier = arguments.compare.as_deref().map(Report::read).transpose()?;
    let gpu = Cuda::new(arguments.device)?;
    let ceilings = ceilings::measure(&gpu)?;
    let shape = published(&arguments.model)?;
    let config = Config::from_json_str(&shape_config(&shape).to_string())?;
    let source = SyntheticWeights::with_recipe(config, arguments.format.clone(), 1);
    let start = Instant::now();
    let model = Qwen35::from_source(&gpu, &source, &mut |_| {})?;
    gpu.finish_loading();
    let report = Report {
        schema: report::SCHEMA.to_owned(),
        version: report::VERSION,
        library: env!("CARGO_PKG_VERSION").to_owned(),
        device: gpu.device().clone(),
        model: arguments.model.clone(),
        format: arguments.format.to_string(),
        weight_bytes: model.weight_bytes() as u64,
        load_seconds: start.elapsed().as_secs_f64(),
        ceilings,
        rows: Vec::new(),
        breakdowns: Vec::new(),
    };
    let mut bench = Bench { arguments, gpu: &gpu, model: &model, shape: &shape, report };
    for &kv in &arguments.kv {
        for &prompt in &arguments.prompt {
            bench.one_sequence(kv, prompt)?;
        }
        measured(&format!("several sequences, {}", kv.format()), bench.several_sequences(kv))?;
    }
    write(arguments, &bench.report, earlier.as_ref())
}

fn write(arguments: &Arguments, report: &Report, earlier: Option<&Report>) -> Result<()> {
    if let Some(file) = &arguments.save {
        let text = serde_json::to_string(report).map_err(|e| Failure::Output(std::io::Error::other(e)))?;
        std::fs::write(file, text + "\n").map_err(|e| Failure::unwritable(file, &e))?;
    }
    let compared = earlier.map(|earlier| compare::compare(earlier, report));
    if arguments.json {
        compared.iter().for_each(|text| output::remark(text));
        return output::write_json(report);
    }
    output::write(&report.tables())?;
    compared.map_or(Ok(()), |text| output::write(&format!("\n{text}")))
}

/// A model whose rows are being measured.
struct Bench<'a> {
    arguments: &'a Arguments,
    gpu: &'a Cuda,
    model: &'a Qwen35<Cuda>,
    shape: &'a ModelShape,
    report: Report,
}

impl Bench<'_> {
    fn chunks(&self) -> Vec<Chunk> {
        match self.arguments.chunk.as_slice() {
            [] => vec![Chunk::Rows(tuning::prefill_chunk(self.gpu.device(), None))],
            list => list.to_vec(),
        }
    }

    /// A prompt in all chunks, and behind it steps and rounds, which do not depend on the chunk.
    fn one_sequence(&mut self, kv: Kv, prompt: usize) -> Result<()> {
        let mut decode = true;
        for chunk in self.chunks() {
            let (new, drafts) = (self.arguments.new, self.arguments.spec_k);
            let setting = Setting { prompt, kv, chunk: chunk.rows(prompt), new, drafts, lanes: 1 };
            let what = format!("prompt {prompt}, {}, chunk {chunk}", kv.format());
            if measured(&what, self.chunk(&setting, chunk, decode))? {
                decode = false;
            }
        }
        Ok(())
    }

    fn chunk(&mut self, setting: &Setting, chunk: Chunk, decode: bool) -> Result<()> {
        let mut session = setting.session(self.model)?;
        // Kernels are compiled by the driver when they are first used, and which are depends on the context.
        drop(measure::prefill(&mut session, setting, 1, 0)?);
        let mut times = Vec::new();
        for _ in 0..self.arguments.repeat {
            times.push(measure::prefill(&mut session, setting, 1, 0)?.1);
        }
        let seconds = report::median(&times).unwrap_or_default();
        let flops = layer_flops(self.shape) * setting.prompt as f64;
        self.report.rows.push(Row {
            kind: Kind::Prefill,
            chunk: Some(chunk.to_string()),
            tokens_per_second: setting.prompt as f64 / seconds,
            bytes: None,
            share: flops / seconds / self.report.ceilings.product_flops,
            device_seconds: None,
            launches: None,
            distinct_experts: None,
            ..self.row(Kind::Prefill, setting, &Rounds { seconds, ..Rounds::default() }, 0)
        });
        if !decode {
            return Ok(());
        }
        let (sequence, _) = measure::prefill(&mut session, setting, 1, 0)?;
        let mut sequences = vec![sequence];
        let plain = measure::rounds(self.gpu, &mut session, &mut sequences, setting.new, 0)?;
        let bytes = self.step_bytes(setting, 1, middle(setting))?;
        self.push(Kind::Decode, setting, &plain, bytes, 1.0);
        // Hidden states of the last tokens only are kept, so MTP starts from a prompt of its own.
        drop(sequences);
        let mut drafting = None;
        if setting.drafts > 0 {
            let (sequence, _) = measure::prefill(&mut session, setting, 1, setting.drafts)?;
            let rounds = measure::rounds(self.gpu, &mut session, &mut [sequence], setting.new, setting.drafts)?;
            let formats = self.arguments.format.formats(self.shape, |_| WeightFormat::Bf16);
            let options = RoundOptions::new(self.shape, middle(setting), setting.drafts).with_kv(setting.kv.format());
            let bytes = roofline::bytes_per_round(self.shape, formats, &options)?.total();
            let tokens = measure::tokens_per_round(setting.drafts, self.arguments.acceptance, setting.new);
            self.push(Kind::Round, setting, &rounds, bytes, tokens);
            drafting = Some(rounds);
        }
        drop(session);
        if self.arguments.breakdown {
            self.breakdown(Kind::Decode, setting, &plain)?;
            if let Some(rounds) = drafting {
                self.breakdown(Kind::Round, setting, &rounds)?;
            }
        }
        Ok(())
    }

    fn breakdown(&mut self, kind: Kind, setting: &Setting, rounds: &Rounds) -> Result<()> {
        let drafts = if kind == Kind::Round { setting.drafts } else { 0 };
        let (steps, floor) = measure::kernels(self.gpu, self.model, setting, drafts)?;
        self.report.breakdowns.push(Breakdown {
            kind,
            prompt: setting.prompt,
            kv: setting.kv.format().to_string(),
            steps: steps.len(),
            floor,
            replay_seconds: rounds.device_seconds,
            kernels: breakdown::group(&steps, measure::resources(self.gpu)),
        });
        Ok(())
    }

    /// Steps of several sequences, each behind a prompt of its own.
    fn several_sequences(&mut self, kv: Kv) -> Result<()> {
        let Some(&lanes) = self.arguments.sequences.iter().max() else { return Ok(()) };
        let Some(&prompt) = self.arguments.prompt.first() else { return Ok(()) };
        let chunk = self.chunks().first().map_or(prompt, |c| c.rows(prompt));
        // A lane that takes part in every width moves by the rounds of all.
        let new = self.arguments.new * self.arguments.sequences.len() + 64 * self.arguments.sequences.len();
        let setting = Setting { prompt, kv, chunk, new, drafts: 0, lanes };
        let mut session = setting.session(self.model)?;
        let mut sequences = Vec::with_capacity(lanes);
        for i in 0..lanes {
            sequences.push(measure::prefill(&mut session, &setting, 1 + i as u64, 0)?.0);
        }
        for &count in &self.arguments.sequences {
            let setting = Setting { lanes: count, new: self.arguments.new, ..setting };
            let taking_part = sequences.get_mut(..count).unwrap_or_default();
            // Those that took part in fewer widths are behind.
            let before = taking_part.iter().map(Sequence::position).sum::<usize>() / count;
            let rounds = measure::rounds(self.gpu, &mut session, taking_part, setting.new, 0)?;
            let context = before + setting.new / 2;
            let bytes = self.step_bytes(&setting, count, context)?;
            self.push(Kind::Aggregate, &setting, &rounds, bytes, count as f64);
        }
        Ok(())
    }

    /// Bytes of a step of `count` sequences of `context` tokens on average: weights once, with the experts that uniform routing reaches; cache and state
    /// of each.
    fn step_bytes(&self, setting: &Setting, count: usize, context: usize) -> Result<u64> {
        let formats = self.arguments.format.formats(self.shape, |_| WeightFormat::Bf16);
        let options = RoundOptions::new(self.shape, context, 0)
            .with_kv(setting.kv.format())
            .with_distinct_experts(expected_distinct_experts(self.shape, count));
        let bytes = roofline::bytes_per_round(self.shape, formats, &options)?;
        Ok(bytes.weights + (bytes.kv + bytes.state) * count as u64)
    }

    /// Adds a row of steps that move `bytes` and count `tokens`.
    fn push(&mut self, kind: Kind, setting: &Setting, rounds: &Rounds, bytes: u64, tokens: f64) {
        let row = self.row(kind, setting, rounds, bytes);
        let is_round = kind == Kind::Round;
        self.report.rows.push(Row {
            tokens_per_second: tokens / rounds.seconds,
            tokens_per_round: is_round.then_some(tokens),
            acceptance: is_round.then_some(self.arguments.acceptance),
            ..row
        });
    }

    fn row(&self, kind: Kind, setting: &Setting, rounds: &Rounds, bytes: u64) -> Row {
        let drafts = if kind == Kind::Round { setting.drafts } else { 0 };
        let experts = expected_distinct_experts(self.shape, setting.lanes * (drafts + 1));
        Row {
            kind,
            prompt: setting.prompt,
            kv: setting.kv.format().to_string(),
            chunk: None,
            sequences: setting.lanes,
            drafts,
            seconds: rounds.seconds,
            tokens_per_second: 0.0,
            bytes: Some(bytes),
            share: roofline::share(bytes, rounds.seconds, self.report.ceilings.copy_bytes_per_second),
            device_seconds: Some(rounds.device_seconds),
            launches: Some(rounds.launches),
            tokens_per_round: None,
            acceptance: None,
            distinct_experts: (experts > 0.0).then_some(experts),
        }
    }
}

/// Tokens in the cache halfway through the measured rounds.
fn middle(setting: &Setting) -> usize {
    setting.prompt + setting.new / 2
}

/// Operations of the layers' products for a token; those of attention, of the recurrence and of the head are left out.
fn layer_flops(shape: &ModelShape) -> f64 {
    let layers = shape.tensors().filter(|t| matches!(t.part, Part::Layer(_)));
    layers.map(|t| 2.0 * t.elements() as f64 * t.read as f64).sum()
}

/// Whether a measurement was made; one for which memory does not suffice is passed over with a remark.
fn measured(what: &str, result: Result<()>) -> Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(error) if is_out_of_memory(&error) => {
            output::remark(&format!("not measured: {what}: {error}"));
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

fn is_out_of_memory(failure: &Failure) -> bool {
    matches!(
        failure,
        Failure::Core(Error::OutOfMemory { .. })
            | Failure::Models(ninfer_models::Error::Core(Error::OutOfMemory { .. }))
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layers_multiply_by_the_weights_that_a_token_meets() {
        // 27 billion parameters with the embedding and head, 3 billion active of 35.
        let billions = |size: &str| layer_flops(&published(size).unwrap()) / 2e9;
        assert!((23.0..26.5).contains(&billions("27b")), "{}", billions("27b"));
        assert!((1.8..3.2).contains(&billions("35b-a3b")), "{}", billions("35b-a3b"));
    }

    #[test]
    fn only_a_lack_of_memory_is_passed_over() {
        let lack = || Error::OutOfMemory { what: "x".to_owned(), requested: 2, available: 1 };
        assert!(is_out_of_memory(&lack().into()));
        assert!(is_out_of_memory(&ninfer_models::Error::Core(lack()).into()));
        assert!(matches!(measured("x", Err(lack().into())), Ok(false)));
        assert!(matches!(measured("x", Ok(())), Ok(true)));
        assert!(measured("x", Err(Failure::usage("x", "y"))).is_err());
    }
}
