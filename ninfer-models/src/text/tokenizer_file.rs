//! Reading `tokenizer.json`: every part is checked before the pipeline is built from it.
//!
//! The file's truncation, padding and post-processing are not read: a prompt is encoded as it stands.

use std::collections::HashMap;

use serde_json::{Map, Value};
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::{self, NFC, NFD, NFKC, NFKD, NormalizerWrapper};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{
    AddedToken, DecoderWrapper, PostProcessorWrapper, PreTokenizerWrapper, SplitDelimiterBehavior, TokenizerImpl,
};

use super::byte_alphabet::{ByteAlphabet, char_of};
use super::error::{TextError, TextResult};
use super::json::{field_error, parse, shorten};
use super::vocabulary::Vocabulary;

/// Normalizer, splitter and merges, assembled from a checked file.
pub(super) type Pipeline =
    TokenizerImpl<BPE, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// Ids at or above this are refused, so that tables indexed by id stay small.
const MAX_IDS: u32 = 1 << 21;
/// Components nested deeper than this are refused.
const MAX_DEPTH: usize = 8;
const WHAT: &str = "tokenizer.json";

/// Parses and checks a whole file, and adds the added tokens that only `tokenizer_config.json` has.
pub(super) fn read(bytes: &[u8], tokenizer_config: Option<&Value>) -> TextResult<(Pipeline, Vocabulary)> {
    let mut file = match parse(bytes, WHAT)? {
        Value::Object(file) => file,
        other => return Err(field_error(WHAT, "the top level", "an object", &other)),
    };
    let (vocab, bpe) = read_model(file.remove("model").unwrap_or_default())?;
    let normalizer = read_normalizer(&file.remove("normalizer").unwrap_or_default(), 0)?;
    let splitter = file.remove("pre_tokenizer").unwrap_or_default();
    let mut byte_levels = 0;
    let pre_tokenizer = read_pre_tokenizer(&splitter, 0, &mut byte_levels)?;
    if byte_levels != 1 {
        return Err(unsupported("pre_tokenizer", &splitter, "exactly one ByteLevel step"));
    }
    check_decoder(&file.remove("decoder").unwrap_or_default())?;
    let mut added = read_added_tokens(file.remove("added_tokens").unwrap_or_default())?;
    if let Some(decoder) = tokenizer_config.and_then(|config| config.get("added_tokens_decoder")) {
        merge_added_tokens(&mut added, decoder)?;
    }

    let vocabulary = tabulate(&vocab, &added)?;
    let mut pipeline = Pipeline::new(bpe);
    pipeline.with_normalizer(normalizer).map_err(|error| inconsistent(error.to_string()))?;
    pipeline.with_pre_tokenizer(Some(pre_tokenizer));
    let contents: Vec<AddedToken> = added.iter().map(|(_, token)| token.clone()).collect();
    pipeline.add_tokens(contents).map_err(|error| inconsistent(format!("added tokens: {error}")))?;
    for (id, token) in &added {
        let got = pipeline.token_to_id(&token.content);
        if got != Some(*id) {
            let content = &token.content;
            return Err(inconsistent(format!(
                "added token {content:?} says id {id}, its place in the list gives {got:?}"
            )));
        }
    }
    Ok((pipeline, vocabulary))
}

/// The token strings with their ids, and the merge model built from them.
fn read_model(model: Value) -> TextResult<(Vec<(String, u32)>, BPE)> {
    let mut model = match model {
        Value::Object(model) => model,
        other => return Err(field_error(WHAT, "model", "an object", &other)),
    };
    match model.get("type") {
        Some(Value::String(kind)) if kind == "BPE" => {}
        // Old files have no type; only BPE has merges.
        None if model.contains_key("merges") => {}
        Some(Value::String(kind)) => return Err(TextError::NotBpe { found: kind.clone() }),
        other => return Err(TextError::NotBpe { found: other.map_or_else(|| "untyped".to_owned(), shorten) }),
    }
    check_plain_bpe(&model)?;
    let vocab = read_vocab(model.remove("vocab").unwrap_or_default())?;
    let merges = read_merges(model.remove("merges").unwrap_or_default())?;
    let ignore_merges = model.get("ignore_merges").and_then(Value::as_bool).unwrap_or(false);

    let ids: Vocab = vocab.iter().cloned().collect();
    let mut joined = String::new();
    for (rank, (left, right)) in merges.iter().enumerate() {
        joined.clear();
        joined.push_str(left);
        joined.push_str(right);
        for part in [left.as_str(), right.as_str(), joined.as_str()] {
            if !ids.contains_key(part) {
                return Err(inconsistent(format!("merge {rank} needs token {part:?}, which is not in the vocabulary")));
            }
        }
    }
    for byte in (0..=u8::MAX).filter(|byte| !matches!(byte, 0xC0 | 0xC1 | 0xF5..=0xFF)) {
        let mut buffer = [0; 4];
        if !ids.contains_key(&*char_of(byte).encode_utf8(&mut buffer)) {
            return Err(inconsistent(format!("byte 0x{byte:02X} has no token, so some text could not be encoded")));
        }
    }
    let bpe = BPE::builder()
        .vocab_and_merges(ids, merges)
        .ignore_merges(ignore_merges)
        .build()
        .map_err(|error| inconsistent(error.to_string()))?;
    Ok((vocab, bpe))
}

/// Refuses the options of other BPE dialects.
fn check_plain_bpe(model: &Map<String, Value>) -> TextResult<()> {
    for part in ["continuing_subword_prefix", "end_of_word_suffix"] {
        match model.get(part) {
            None | Some(Value::Null) => {}
            Some(Value::String(affix)) if affix.is_empty() => {}
            Some(other) => return Err(unsupported("subword affix", other, "none (byte-level BPE has no affixes)")),
        }
    }
    match model.get("dropout") {
        None | Some(Value::Null) => {}
        Some(dropout) if dropout.as_f64() == Some(0.0) => {}
        Some(dropout) => return Err(unsupported("dropout", dropout, "none (encoding must be deterministic)")),
    }
    match model.get("byte_fallback") {
        None | Some(Value::Null | Value::Bool(false)) => Ok(()),
        Some(other) => Err(unsupported("byte_fallback", other, "false (bytes are in the vocabulary)")),
    }
}

fn read_vocab(vocab: Value) -> TextResult<Vec<(String, u32)>> {
    let entries = match vocab {
        Value::Object(entries) => entries,
        other => return Err(field_error(WHAT, "model.vocab", "an object of token to id", &other)),
    };
    entries
        .into_iter()
        .map(|(token, id)| {
            let id = read_id(&id, &format!("model.vocab[{token:?}]"))?;
            Ok((token, id))
        })
        .collect()
}

fn read_id(id: &Value, field: &str) -> TextResult<u32> {
    let number = id.as_u64().ok_or_else(|| field_error(WHAT, field, "a token id", id))?;
    match u32::try_from(number) {
        Ok(small) if small < MAX_IDS => Ok(small),
        _ => Err(TextError::TooLarge { what: format!("{WHAT}: {field}"), got: number, limit: u64::from(MAX_IDS - 1) }),
    }
}

/// Merges come as pairs, or in older files as one string with a space between the parts.
fn read_merges(merges: Value) -> TextResult<Vec<(String, String)>> {
    let items = match merges {
        Value::Array(items) => items,
        other => return Err(field_error(WHAT, "model.merges", "a list", &other)),
    };
    let mut pairs = Vec::with_capacity(items.len());
    for (rank, item) in items.into_iter().enumerate() {
        let pair = match &item {
            Value::String(line) => line.split_once(' ').map(|(left, right)| (left.to_owned(), right.to_owned())),
            Value::Array(parts) => match parts.as_slice() {
                [Value::String(left), Value::String(right)] => Some((left.clone(), right.clone())),
                _ => None,
            },
            _ => None,
        };
        let field = || format!("model.merges[{rank}]");
        pairs.push(pair.ok_or_else(|| field_error(WHAT, &field(), "two tokens", &item))?);
    }
    Ok(pairs)
}

fn read_normalizer(normalizer: &Value, depth: usize) -> TextResult<Option<NormalizerWrapper>> {
    const SUPPORTED: &str = "none, NFC, NFD, NFKC, NFKD and sequences of them";
    if normalizer.is_null() {
        return Ok(None);
    }
    let refused = || unsupported("normalizer", normalizer, SUPPORTED);
    Ok(Some(match normalizer.get("type").and_then(Value::as_str) {
        Some("NFC") => NFC.into(),
        Some("NFD") => NFD.into(),
        Some("NFKC") => NFKC.into(),
        Some("NFKD") => NFKD.into(),
        Some("Sequence") if depth < MAX_DEPTH => {
            let steps = normalizer.get("normalizers").and_then(Value::as_array).ok_or_else(refused)?;
            let steps: Vec<_> = steps.iter().map(|step| read_normalizer(step, depth + 1)).collect::<TextResult<_>>()?;
            normalizers::Sequence::new(steps.into_iter().flatten().collect()).into()
        }
        _ => return Err(refused()),
    }))
}

fn read_pre_tokenizer(step: &Value, depth: usize, byte_levels: &mut usize) -> TextResult<PreTokenizerWrapper> {
    const SUPPORTED: &str = "Split, ByteLevel, Digits and sequences of them";
    let refused = || unsupported("pre_tokenizer", step, SUPPORTED);
    let flag = |name: &str| step.get(name).and_then(Value::as_bool);
    Ok(match step.get("type").and_then(Value::as_str) {
        Some("Sequence") if depth < MAX_DEPTH => {
            let steps = step.get("pretokenizers").and_then(Value::as_array).ok_or_else(refused)?;
            let steps = steps
                .iter()
                .map(|step| read_pre_tokenizer(step, depth + 1, byte_levels))
                .collect::<TextResult<Vec<_>>>()?;
            Sequence::new(steps).into()
        }
        Some("ByteLevel") => {
            *byte_levels += 1;
            let prefix = flag("add_prefix_space").unwrap_or(true);
            ByteLevel::new(prefix, true, flag("use_regex").unwrap_or(true)).into()
        }
        Some("Digits") => Digits::new(flag("individual_digits").unwrap_or(false)).into(),
        Some("Split") => read_split(step)?.into(),
        _ => return Err(refused()),
    })
}

fn read_split(step: &Value) -> TextResult<Split> {
    let pattern = step.get("pattern").unwrap_or(&Value::Null);
    let text = |name: &str| pattern.get(name).and_then(Value::as_str).map(str::to_owned);
    let pattern = match (text("Regex"), text("String")) {
        (Some(regex), None) => SplitPattern::Regex(regex),
        (None, Some(literal)) => SplitPattern::String(literal),
        _ => return Err(field_error(WHAT, "pre_tokenizer.pattern", "a Regex or a String", pattern)),
    };
    let behavior = match step.get("behavior").and_then(Value::as_str) {
        Some("Isolated") => SplitDelimiterBehavior::Isolated,
        Some("MergedWithPrevious") => SplitDelimiterBehavior::MergedWithPrevious,
        Some("MergedWithNext") => SplitDelimiterBehavior::MergedWithNext,
        Some("Contiguous") => SplitDelimiterBehavior::Contiguous,
        _ => {
            return Err(unsupported(
                "split behavior",
                step.get("behavior").unwrap_or(&Value::Null),
                "the lossless ones",
            ));
        }
    };
    let invert = step.get("invert").and_then(Value::as_bool).unwrap_or(false);
    Split::new(pattern, behavior, invert).map_err(|error| TextError::UnsupportedTokenizer {
        part: "split pattern",
        found: error.to_string(),
        supported: "valid regular expressions",
    })
}

fn check_decoder(decoder: &Value) -> TextResult<()> {
    let is_byte_level = |value: &Value| value.get("type").and_then(Value::as_str) == Some("ByteLevel");
    let steps = decoder.get("decoders").and_then(Value::as_array);
    if is_byte_level(decoder) || steps.is_some_and(|steps| matches!(steps.as_slice(), [only] if is_byte_level(only))) {
        return Ok(());
    }
    Err(unsupported("decoder", decoder, "ByteLevel"))
}

/// The added tokens in ascending order of id, which is the order ids are given out in.
fn read_added_tokens(added: Value) -> TextResult<Vec<(u32, AddedToken)>> {
    let items = match added {
        Value::Null => return Ok(Vec::new()),
        Value::Array(items) => items,
        other => return Err(field_error(WHAT, "added_tokens", "a list", &other)),
    };
    let mut tokens = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        let field = |name: &str| format!("added_tokens[{index}].{name}");
        let get = |name: &str| item.get(name).unwrap_or(&Value::Null);
        let id = read_id(get("id"), &field("id"))?;
        let content = match get("content") {
            Value::String(content) if !content.is_empty() => content.clone(),
            other => return Err(field_error(WHAT, &field("content"), "a non-empty string", other)),
        };
        for name in ["single_word", "lstrip", "rstrip"] {
            if get(name) == &Value::Bool(true) {
                return Err(unsupported("added token option", item, "verbatim matching without stripping"));
            }
        }
        let special = get("special").as_bool().unwrap_or(false);
        let normalized = get("normalized").as_bool().unwrap_or(!special);
        tokens.push((id, AddedToken::from(content, special).normalized(normalized)));
    }
    tokens.sort_by_key(|(id, _)| *id);
    Ok(tokens)
}

/// Adds the tokens of `added_tokens_decoder`, an object from id to token, that are not there yet.
fn merge_added_tokens(added: &mut Vec<(u32, AddedToken)>, decoder: &Value) -> TextResult<()> {
    const WHAT: &str = "tokenizer_config.json";
    let entries = match decoder {
        Value::Null => return Ok(()),
        Value::Object(entries) => entries,
        other => return Err(field_error(WHAT, "added_tokens_decoder", "an object of id to token", other)),
    };
    let mut by_id: HashMap<u32, String> = added.iter().map(|(id, t)| (*id, t.content.clone())).collect();
    let mut by_content: HashMap<String, u32> = added.iter().map(|(id, t)| (t.content.clone(), *id)).collect();
    for (id, token) in entries {
        let field = format!("added_tokens_decoder[{id:?}]");
        let number = id.parse::<u32>().ok().filter(|&id| id < MAX_IDS);
        let number = number.ok_or_else(|| field_error(WHAT, &field, "a token id as its name", token))?;
        let content = match token.get("content") {
            Some(Value::String(content)) if !content.is_empty() => content,
            _ => return Err(field_error(WHAT, &field, "an object with a content", token)),
        };
        match (by_id.get(&number), by_content.get(content)) {
            (Some(c), Some(id)) if c == content && *id == number => {}
            (None, None) => {
                let flag = |name: &str| token.get(name).and_then(Value::as_bool);
                let special = flag("special").unwrap_or(false);
                let normalized = flag("normalized").unwrap_or(!special);
                by_id.insert(number, content.clone());
                by_content.insert(content.clone(), number);
                added.push((number, AddedToken::from(content.clone(), special).normalized(normalized)));
            }
            _ => {
                let reason = "which tokenizer.json gives to another token or id";
                return Err(inconsistent(format!("tokenizer_config.json says {content:?} is {number}, {reason}")));
            }
        }
    }
    added.sort_by_key(|(id, _)| *id);
    Ok(())
}

/// Bytes by id; refuses two tokens with one id.
fn tabulate(vocab: &[(String, u32)], added: &[(u32, AddedToken)]) -> TextResult<Vocabulary> {
    let alphabet = ByteAlphabet::new();
    let ids = vocab.iter().map(|(_, id)| *id).chain(added.iter().map(|(id, _)| *id));
    let len = ids.max().map_or(0, |highest| highest as usize + 1);
    let mut strings: Vec<Option<(&str, bool)>> = vec![None; len];
    let all = vocab
        .iter()
        .map(|(token, id)| (*id, token.as_str(), false))
        .chain(added.iter().map(|(id, token)| (*id, token.content.as_str(), token.special)));
    for (id, token, special) in all {
        let Some(slot) = strings.get_mut(id as usize) else { continue };
        match slot {
            // An added token may name a token of the vocabulary to give it properties.
            Some((earlier, _)) if *earlier != token => {
                return Err(inconsistent(format!("id {id} is given to both {earlier:?} and {token:?}")));
            }
            _ => *slot = Some((token, special)),
        }
    }
    Ok(Vocabulary::new(
        strings.into_iter().map(|slot| slot.map(|(token, special)| (alphabet.token_bytes(token), special))).collect(),
    ))
}

fn inconsistent(reason: String) -> TextError {
    TextError::InconsistentTokenizer { reason }
}

fn unsupported(part: &'static str, found: &Value, supported: &'static str) -> TextError {
    let found = match found.get("type").and_then(Value::as_str) {
        Some(kind) => kind.to_owned(),
        None => shorten(found),
    };
    TextError::UnsupportedTokenizer { part, found, supported }
}
