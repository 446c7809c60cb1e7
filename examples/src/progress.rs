//! Progress bars on standard error.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Bars for the long steps of a program, or nothing.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    shown: bool,
}

impl Progress {
    /// Shows bars if `shown` is set and standard error is a terminal.
    #[must_use]
    pub fn new(shown: bool) -> Self {
        Self { shown }
    }

    /// A bar of `length` steps, which are `unit`s.
    #[must_use]
    pub fn bar(self, what: &'static str, length: u64, unit: &str) -> ProgressBar {
        if !self.shown {
            return ProgressBar::hidden();
        }
        let bar = ProgressBar::with_draw_target(Some(length), ProgressDrawTarget::stderr());
        let template = format!("{{prefix:>10}} [{{bar:40}}] {{pos}}/{{len}} {unit} {{msg}}");
        let style = ProgressStyle::with_template(&template).unwrap_or_else(|_| ProgressStyle::default_bar());
        bar.with_style(style.progress_chars("=> ")).with_prefix(what)
    }
}
