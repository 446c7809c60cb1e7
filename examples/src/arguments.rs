//! Reading the command line, with the same error lines as everything else.

use std::process::ExitCode;

use clap::Parser;
use clap::builder::RangedU64ValueParser;
use clap::error::ErrorKind;

use crate::failure::complain;

/// Parses the command line of this process.
///
/// # Errors
/// The status to exit with, after everything was printed: 0 for `--help` and `--version`, 2 for a command line that is not
/// legal.
pub fn parse<P: Parser>() -> Result<P, ExitCode> {
    P::try_parse().map_err(|error| match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            // A reader that has gone needs no help.
            let _ = error.print();
            ExitCode::SUCCESS
        }
        _ => {
            let (message, help) = lines(&error.to_string(), P::command().get_name());
            complain(&message, &help);
            ExitCode::from(2)
        }
    })
}

/// Accepts numbers from `least` on.
#[must_use]
pub fn from(least: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(least..)
}

/// Accepts numbers from `least` to `most`.
#[must_use]
pub fn within(least: u64, most: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(least..=most)
}

/// Message and help of clap's own text: `error: message`, indented details, `tip: …`, usage and a pointer to `--help`.
fn lines(text: &str, program: &str) -> (String, String) {
    let ends = |line: &&str| !line.starts_with("Usage:") && !line.starts_with("For more information");
    let mut message = String::new();
    let mut help = String::new();
    for line in text.lines().take_while(ends).map(str::trim).filter(|line| !line.is_empty()) {
        let (to, part) = match line.strip_prefix("tip: ") {
            Some(tip) => (&mut help, tip),
            None => (&mut message, line.strip_prefix("error: ").unwrap_or(line)),
        };
        if !to.is_empty() {
            to.push(' ');
        }
        to.push_str(part);
    }
    if !help.is_empty() {
        help.push_str("; ");
    }
    help.push_str(&format!("`{program} --help` lists the options"));
    (message, help)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clap_text_becomes_two_lines() {
        let text = "error: unexpected argument '--seeed' found\n\n  tip: a similar argument exists: '--seed'\n\n\
                    Usage: generate --seed <N>\n\nFor more information, try '--help'.\n";
        let (message, help) = lines(text, "generate");
        assert_eq!(message, "unexpected argument '--seeed' found");
        assert_eq!(help, "a similar argument exists: '--seed'; `generate --help` lists the options");
        let text = "error: invalid value 'x' for '--spec <S>'\n  [possible values: mtp, off]\n\nFor more information\n";
        assert_eq!(lines(text, "p").0, "invalid value 'x' for '--spec <S>' [possible values: mtp, off]");
    }
}
