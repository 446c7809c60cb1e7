//! How tokens are chosen: the publisher's settings, changed by options.

use clap::Args;
use ninfer_core::sampling::SamplingParams;
use ninfer_models::text::GenerationDefaults;

use crate::{Failure, Result};

/// Options of sampling; what is not given comes from the checkpoint's `generation_config.json`.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Sampling (defaults come from the model's generation_config.json)")]
pub struct SamplingArguments {
    /// Take the most likely token; wins over the options of sampling
    #[arg(long)]
    pub greedy: bool,
    /// Divides the logits; 0 is greedy
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub temperature: Option<f32>,
    /// Keep the K most likely tokens; 0 keeps all
    #[arg(long, value_name = "K")]
    pub top_k: Option<u32>,
    /// Keep the most likely tokens that together reach the share P
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Drop tokens less likely than P times the most likely one
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// Subtracted from the logits of tokens that were generated before
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub presence_penalty: Option<f32>,
    /// Subtracted from the logit of a token for each time it was generated
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub frequency_penalty: Option<f32>,
    /// Divides positive logits of tokens that stand in the text, multiplies negative ones
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub repetition_penalty: Option<f32>,
    /// Selects the random numbers: the same seed gives the same text, with and without speculation
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
}

impl SamplingArguments {
    /// The parameters: `--greedy`, else each option, else the publisher's value, else a neutral one.
    ///
    /// A checkpoint that does not ask for sampling (`do_sample`) is decoded greedily until an option of sampling is given.
    ///
    /// # Errors
    /// [`Failure::Usage`] for a value outside its range.
    pub fn params(&self, defaults: &GenerationDefaults) -> Result<SamplingParams> {
        let asked = self.temperature.is_some() || self.top_k.is_some() || self.top_p.is_some() || self.min_p.is_some();
        let samples = !self.greedy && (asked || defaults.do_sample == Some(true));
        let temperature = if samples { self.temperature.or(defaults.temperature).unwrap_or(1.0) } else { 0.0 };
        let params = SamplingParams::greedy()
            .with_temperature(temperature)
            .with_top_k(self.top_k.or(defaults.top_k).unwrap_or(0))
            .with_top_p(self.top_p.or(defaults.top_p).unwrap_or(1.0))
            .with_min_p(self.min_p.or(defaults.min_p).unwrap_or(0.0))
            .with_presence(self.presence_penalty.or(defaults.presence_penalty).unwrap_or(0.0))
            .with_frequency(self.frequency_penalty.or(defaults.frequency_penalty).unwrap_or(0.0))
            .with_repetition(self.repetition_penalty.or(defaults.repetition_penalty).unwrap_or(1.0))
            .with_seed(self.seed);
        params.validate().map_err(|error| Failure::usage(error.to_string(), error.help()))?;
        Ok(params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn publisher() -> GenerationDefaults {
        GenerationDefaults::from_json(br#"{"do_sample": true, "temperature": 0.7, "top_p": 0.8, "top_k": 20}"#).unwrap()
    }

    #[test]
    fn options_win_over_the_publisher_and_greedy_over_both() {
        let params = SamplingArguments::default().params(&publisher()).unwrap();
        assert_eq!((params.temperature, params.top_p, params.top_k, params.min_p), (0.7, 0.8, 20, 0.0));
        let warm = SamplingArguments { temperature: Some(1.5), seed: 9, ..Default::default() };
        let params = warm.params(&publisher()).unwrap();
        assert_eq!((params.temperature, params.top_p, params.seed), (1.5, 0.8, 9));
        let greedy = SamplingArguments { greedy: true, presence_penalty: Some(0.5), ..warm };
        let params = greedy.params(&publisher()).unwrap();
        assert!(params.is_greedy() && params.has_penalties());
    }

    #[test]
    fn nobody_samples_who_was_not_asked_to() {
        let silent = GenerationDefaults::default();
        assert!(SamplingArguments::default().params(&silent).unwrap().is_greedy());
        let asked = SamplingArguments { top_k: Some(5), ..Default::default() };
        assert_eq!(asked.params(&silent).unwrap().temperature, 1.0);
    }

    #[test]
    fn values_out_of_range_are_usage_errors() {
        for (temperature, top_p) in [(-1.0, 0.5), (f32::NAN, 0.5), (1.0, 0.0), (1.0, 1.5)] {
            let wrong = SamplingArguments { temperature: Some(temperature), top_p: Some(top_p), ..Default::default() };
            assert_eq!(wrong.params(&publisher()).unwrap_err().status(), 2);
        }
    }
}
