//! A rendered conversation.

/// The text of a rendered conversation and what the reader of the reply must know about its end.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Prompt {
    /// The prompt, to be encoded with [`Tokenizer::encode`](super::Tokenizer::encode).
    pub text: String,
    /// The prompt ends inside an open `<think>` block: the first generated text is reasoning, and the reply has a
    /// `</think>` without a `<think>`. Templates open the block on purpose when thinking is on.
    pub in_thinking: bool,
}

impl Prompt {
    /// Wraps rendered or raw text and looks at its last turn for an open `<think>`.
    ///
    /// Only text behind the last `<|im_start|>` counts, so markers written by a user in an earlier turn do not
    /// confuse it, and a turn that was ended by `<|im_end|>` is never open.
    ///
    /// ```
    /// use ninfer_models::text::Prompt;
    ///
    /// assert!(Prompt::new("<|im_start|>assistant\n<think>\n").in_thinking);
    /// assert!(!Prompt::new("<|im_start|>assistant\n<think>\n\n</think>\n\n").in_thinking);
    /// assert!(!Prompt::new("<|im_start|>user\n<think><|im_end|>\n").in_thinking);
    /// ```
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        let text = text.into();
        let turn = text.rsplit_once("<|im_start|>").map_or(text.as_str(), |(_, turn)| turn);
        let turn = turn.rsplit_once("<|im_end|>").map_or(turn, |(_, rest)| rest);
        let in_thinking = turn.rfind("<think>") > turn.rfind("</think>");
        Self { text, in_thinking }
    }
}
