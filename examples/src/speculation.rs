//! Whether and how tokens are drafted.

use std::str::FromStr;

use clap::{Args, ValueEnum};
use ninfer_spec::{Drafts, NgramDrafter, Options};

use crate::{Failure, Result};

/// Most drafts of an MTP round.
pub const MOST_MTP_DRAFTS: usize = 5;
/// Most drafts of a round with n-grams: a round has 16 columns, one of them the last token.
pub const MOST_NGRAM_DRAFTS: usize = 15;
/// Lengths of the n-grams that are looked up.
const NGRAMS: (usize, usize) = (2, 4);

/// Who drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Method {
    /// The model's multi-token-prediction block
    Mtp,
    /// Copies of what followed the same words earlier in the text
    Ngram,
    /// Nobody: plain decoding
    Off,
}

/// How many drafts a round verifies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DraftTokens {
    /// As many as pay, measured while decoding.
    #[default]
    Auto,
    /// Always this many.
    Count(usize),
}

impl FromStr for DraftTokens {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.parse()) {
            ("auto", _) => Ok(Self::Auto),
            (_, Ok(0)) => Err("0 drafts is `--spec off`".to_owned()),
            (_, Ok(count)) => Ok(Self::Count(count)),
            (_, Err(_)) => Err("expected a number or auto".to_owned()),
        }
    }
}

/// Options of speculation. It changes the speed and never the text.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Speculation (changes the speed, never the text)")]
pub struct SpeculationArguments {
    /// Who drafts [default: mtp, or off where the model has no MTP block]
    #[arg(long, value_name = "mtp|ngram|off")]
    pub spec: Option<Method>,
    /// Drafts a round verifies: 1 to 5 with MTP, 1 to 15 with n-grams, or as many as pay [default: auto]
    #[arg(long, value_name = "K|auto")]
    pub draft_tokens: Option<DraftTokens>,
}

/// What was decided.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Speculation {
    /// Who drafts.
    pub method: Method,
    /// How many drafts.
    pub drafts: Drafts,
    /// Most drafts of a round, for the size of the session.
    pub most: usize,
    /// What the user should know.
    pub note: Option<&'static str>,
}

impl SpeculationArguments {
    /// Settles the options for a model.
    ///
    /// # Errors
    /// [`ninfer_core::Error::MtpUnavailable`] where MTP was asked for and the model has none; [`Failure::Usage`] for a number
    /// of drafts that the method cannot verify.
    pub fn settle(&self, model_has_mtp: bool) -> Result<Speculation> {
        let off = |note| Speculation { method: Method::Off, drafts: Drafts::Off, most: 0, note };
        let (method, limit) = match self.spec {
            Some(Method::Off) if self.draft_tokens.is_some() => {
                return Err(Failure::usage("--draft-tokens has no meaning with --spec off", "drop one of the two"));
            }
            Some(Method::Off) => return Ok(off(None)),
            Some(Method::Ngram) => (Method::Ngram, MOST_NGRAM_DRAFTS),
            Some(Method::Mtp) if !model_has_mtp => {
                let reason = "this checkpoint has no MTP block".to_owned();
                return Err(ninfer_core::Error::MtpUnavailable { reason }.into());
            }
            None if !model_has_mtp => return Ok(off(Some("speculation is off: this checkpoint has no MTP block"))),
            None | Some(Method::Mtp) => (Method::Mtp, MOST_MTP_DRAFTS),
        };
        let (drafts, most) = match self.draft_tokens.unwrap_or_default() {
            DraftTokens::Auto => (Drafts::Auto { max: limit }, limit),
            DraftTokens::Count(k) if k <= limit => (Drafts::Fixed(k), k),
            DraftTokens::Count(k) => {
                let message = format!("--draft-tokens is {k}, a round of this method has at most {limit}");
                return Err(Failure::usage(message, format!("give 1 to {limit}, or auto")));
            }
        };
        Ok(Speculation { method, drafts, most, note: None })
    }
}

impl Speculation {
    /// Whether the model's MTP block is used.
    #[must_use]
    pub fn uses_mtp(&self) -> bool {
        self.method == Method::Mtp
    }

    /// Adds drafter and number of drafts to the options of a generator.
    ///
    /// # Errors
    /// What the drafter reports.
    pub fn apply(&self, options: Options) -> Result<Options> {
        let options = options.with_drafts(self.drafts);
        Ok(match self.method {
            Method::Mtp => options.with_mtp(),
            Method::Ngram => options.with_ngram(NgramDrafter::new(NGRAMS.0, NGRAMS.1)?),
            Method::Off => options,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(spec: Option<Method>, draft_tokens: Option<DraftTokens>) -> SpeculationArguments {
        SpeculationArguments { spec, draft_tokens }
    }

    #[test]
    fn the_default_is_mtp_where_there_is_one() {
        let settled = asked(None, None).settle(true).unwrap();
        assert_eq!((settled.method, settled.drafts, settled.most), (Method::Mtp, Drafts::Auto { max: 5 }, 5));
        let settled = asked(None, Some(DraftTokens::Count(3))).settle(false).unwrap();
        assert_eq!((settled.method, settled.most), (Method::Off, 0));
        assert!(settled.note.is_some());
    }

    #[test]
    fn mtp_that_was_asked_for_must_be_there() {
        let failure = asked(Some(Method::Mtp), None).settle(false).unwrap_err();
        assert_eq!(failure.status(), 1);
        assert!(failure.to_string().contains("no MTP block"));
    }

    #[test]
    fn numbers_of_drafts_have_limits() {
        let most = |spec, k| asked(Some(spec), Some(DraftTokens::Count(k))).settle(true).map(|s| s.most);
        assert_eq!(most(Method::Mtp, 5).unwrap(), 5);
        assert_eq!(most(Method::Mtp, 6).unwrap_err().status(), 2);
        assert_eq!(most(Method::Ngram, 15).unwrap(), 15);
        assert_eq!(most(Method::Ngram, 16).unwrap_err().status(), 2);
        assert_eq!(most(Method::Off, 1).unwrap_err().status(), 2);
        assert!("0".parse::<DraftTokens>().is_err() && "x".parse::<DraftTokens>().is_err());
        assert_eq!("auto".parse(), Ok(DraftTokens::Auto));
    }
}
