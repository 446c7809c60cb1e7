//! Decoding with a checkpoint: plain, and with each number of MTP drafts.

use std::path::Path;

use ninfer_examples::table::{Align, Table};
use ninfer_examples::{Failure, Result};
use ninfer_kernels::cpu::Cpu;
use ninfer_models::text::{ChatOptions, Message, Text};
use ninfer_models::{Qwen35, Recipe, SessionOptions};
use ninfer_spec::{Drafts, Generator, Options, Statistics};
use serde_json::json;

use crate::{Measured, median};

/// Most drafts of a round.
const MAX_DRAFTS: usize = 5;
/// Longest prompt, in tokens.
const MAX_PROMPT: usize = 256;
/// What the shipped model was trained to answer.
const QUESTIONS: [&str; 8] = [
    "What does `Vec::push` do?",
    "What is `Option::map`?",
    "Explain the error E0382.",
    "How is `HashMap::entry` used?",
    "What is a trait object?",
    "What does `Iterator::fold` do?",
    "When does `String::from_utf8` fail?",
    "What is the difference between `Rc` and `Arc`?",
];

/// How drafts are made.
#[derive(Clone, Copy)]
enum Setting {
    Plain,
    Mtp(usize),
    Auto,
}

impl Setting {
    fn name(self) -> String {
        match self {
            Self::Plain => "plain".to_owned(),
            Self::Mtp(k) => format!("MTP {k}"),
            Self::Auto => "MTP auto".to_owned(),
        }
    }

    fn drafts(self) -> Drafts {
        match self {
            Self::Plain => Drafts::Off,
            Self::Mtp(k) => Drafts::Fixed(k),
            Self::Auto => Drafts::Auto { max: MAX_DRAFTS },
        }
    }

    fn session(self, new: usize) -> SessionOptions {
        let most = match self {
            Self::Plain => 0,
            Self::Mtp(k) => k,
            Self::Auto => MAX_DRAFTS,
        };
        SessionOptions::new(MAX_PROMPT + new + 2 * MAX_DRAFTS).with_max_drafts(most).with_mtp(most > 0)
    }
}

/// A setting with what it did: statistics of each repetition, and the answers of the last.
struct Series {
    setting: Setting,
    runs: Vec<Statistics>,
}

/// Answers a few questions with every setting, in turns, so that other load on the machine meets all of them.
pub fn measure(cpu: &Cpu, dir: &Path, recipe: &Recipe, new: usize, repeat: usize) -> Result<Measured> {
    let text = Text::load(dir)?;
    let model = Qwen35::load(cpu, dir, recipe, &mut |_| {})?;
    let mut prompts = Vec::new();
    for question in QUESTIONS {
        let prompt = text.render(&[Message::user(question)], &ChatOptions::new().with_thinking(false))?;
        let mut ids = text.tokenizer().encode(&prompt.text)?;
        ids.truncate(MAX_PROMPT);
        prompts.push(ids);
    }

    let mut settings = vec![Setting::Plain];
    if model.has_mtp() {
        settings.extend((1..=MAX_DRAFTS).map(Setting::Mtp).chain([Setting::Auto]));
    }
    let mut series: Vec<_> = settings.into_iter().map(|setting| Series { setting, runs: Vec::new() }).collect();
    // Greedy answers do not depend on the setting; those that run in circles are left out.
    let mut expected: Vec<Option<Vec<u32>>> = Vec::new();
    // The first repetition only warms up.
    for repetition in 0..=repeat {
        for Series { setting, runs } in &mut series {
            let mut session = model.session(&setting.session(new).with_token_limit(text.tokenizer().len()))?;
            let options = Options::new()
                .with_max_new(new)
                .with_stop(text.stop_tokens().ids())
                .with_mtp()
                .with_drafts(setting.drafts());
            let mut generator = Generator::new(&mut session, options)?;
            let mut sum = Statistics::new();
            for (i, prompt) in prompts.iter().enumerate() {
                let answer = generator.generate(prompt, <[u32]>::len)?;
                match expected.get(i) {
                    None => expected.push((!answer.statistics.looping).then_some(answer.tokens)),
                    Some(None) => continue,
                    Some(Some(tokens)) if *tokens != answer.tokens => return Err(differs(dir, *setting, i)),
                    Some(Some(_)) => {}
                }
                if !answer.statistics.looping {
                    sum.merge(&answer.statistics)?;
                }
            }
            if repetition > 0 {
                runs.push(sum);
            }
        }
    }
    let used = expected.iter().flatten().count();
    if used == 0 {
        return Err(Failure::usage(
            "every answer runs in circles, so there is nothing to measure",
            "give a smaller --new",
        ));
    }
    Ok(report(&series, &model, used, recipe))
}

fn differs(dir: &Path, setting: Setting, question: usize) -> Failure {
    let question = QUESTIONS.get(question).copied().unwrap_or_default();
    Failure::content(dir, format!("{} answers {question:?} with other tokens than plain decoding", setting.name()))
}

fn report(series: &[Series], model: &Qwen35<Cpu>, used: usize, recipe: &Recipe) -> Measured {
    let speed = |s: &Series| median(s.runs.iter().map(Statistics::tokens_per_second).collect());
    let plain = series.first().map_or(0.0, speed);
    let columns = ["tok/s", "against plain", "tokens a round", "drafts accepted", "ms a round"];
    let mut heads = vec![("setting", Align::Left)];
    heads.extend(columns.map(|c| (c, Align::Right)));
    let mut table = Table::new(&heads);
    let mut rows = Vec::new();
    for s in series {
        let (Some(counts), speed) = (s.runs.last(), speed(s)) else { continue };
        let ms = 1e3 * median(s.runs.iter().map(|r| r.decode_seconds / r.rounds.max(1) as f64).collect());
        let share = if counts.drafted > 0 { format!("{:.1} %", 100.0 * counts.acceptance()) } else { "-".to_owned() };
        table.row([
            s.setting.name(),
            format!("{speed:.1}"),
            format!("{:.2}", speed / plain),
            format!("{:.2}", counts.tokens_per_round()),
            share,
            format!("{ms:.3}"),
        ]);
        rows.push(json!({
            "setting": s.setting.name(),
            "tokens_per_second": speed,
            "tokens_per_second_of_each": s.runs.iter().map(Statistics::tokens_per_second).collect::<Vec<_>>(),
            "against_plain": speed / plain,
            "milliseconds_per_round": ms,
            "statistics": counts,
        }));
    }
    let tokens = series.first().and_then(|s| s.runs.last()).map_or(0, |r| r.decode_tokens);
    let circles = match QUESTIONS.len() - used {
        0 => String::new(),
        n => format!(" ({n} more run in circles)"),
    };
    let megabytes = model.weight_bytes() as f64 / 1e6;
    let head =
        format!("{used} answers{circles}, {tokens} tokens, weights {recipe}, {megabytes:.1} MB on the device\n\n");
    let json = json!({
        "answers": used,
        "tokens": tokens,
        "weights": recipe,
        "weight_bytes": model.weight_bytes(),
        "settings": rows,
    });
    Measured { table: head + &table.to_string(), json }
}
