//! Tensor names under one prefix.
//!
//! The text model stands under `model.language_model.` (multimodal releases), `model.` (text-only exports) or
//! `language_model.model.` (exports that nest the other way). Inside this module all three are written `model.`; head and
//! MTP block are `lm_head` and `mtp.`, below `language_model.` in the last layout.

use std::collections::{HashMap, HashSet};

use ninfer_quant::checkpoint::{ACTIVATION_SUFFIXES, split_name};

use crate::checkpoint::Checkpoint;
use crate::error::NameList;
use crate::{Error, Result};

/// Prefixes of the text model, a longer one before those it starts with.
const TEXT: [&str; 3] = ["model.language_model.", "language_model.model.", "model."];
/// Prefixes of the vision tower, which a text model skips.
const VISION: [&str; 3] = ["model.visual.", "visual.", "vision_tower."];
/// What precedes head and MTP block under the second text prefix.
const NESTED: &str = "language_model.";
const HEAD: &str = "lm_head.";
const MTP: &str = "mtp.";
const EXPERTS: &str = ".mlp.experts.";

/// What a name says about its tensor.
#[derive(Debug, PartialEq, Eq)]
enum Class<'a> {
    /// Text model, below this prefix.
    Text(&'static str, &'a str),
    /// `lm_head.…` or `mtp.…`.
    Root(&'a str),
    Vision,
    /// Scales of activations or of the KV cache.
    Activation,
    Unknown,
}

fn class(name: &str) -> Class<'_> {
    if VISION.iter().any(|p| name.starts_with(p)) {
        return Class::Vision;
    }
    if name.rsplit_once('.').is_some_and(|(_, suffix)| ACTIVATION_SUFFIXES.contains(&suffix)) {
        return Class::Activation;
    }
    let outer = name.strip_prefix(NESTED).unwrap_or(name);
    if outer.starts_with(HEAD) || outer.starts_with(MTP) {
        return Class::Root(outer);
    }
    TEXT.iter().find_map(|&p| Some(Class::Text(p, name.strip_prefix(p)?))).unwrap_or(Class::Unknown)
}

/// A tensor by its normalised name.
#[derive(Clone, Copy, Debug)]
struct Named {
    /// Index into the tensors of the checkpoint.
    tensor: usize,
    used: bool,
}

/// The tensors of a checkpoint by normalised name, and which of them have been used.
#[derive(Debug)]
pub(super) struct Names {
    /// The prefix found, or the most common one where there is no text tensor.
    prefix: &'static str,
    tensors: HashMap<String, Named>,
    /// Normalised module name to the suffixes stored for it.
    modules: HashMap<String, Vec<(String, usize)>>,
    /// Stems of the layers that have tensors of single experts.
    split_experts: HashSet<String>,
    unknown: Vec<usize>,
}

impl Names {
    pub(super) fn new(checkpoint: &Checkpoint) -> Result<Self> {
        let mut out = Self {
            prefix: TEXT[0],
            tensors: HashMap::new(),
            modules: HashMap::new(),
            split_experts: HashSet::new(),
            unknown: Vec::new(),
        };
        let mut seen: Option<(&'static str, &str)> = None;
        for (tensor, entry) in checkpoint.tensors().iter().enumerate() {
            let name = match class(entry.name()) {
                Class::Vision | Class::Activation => continue,
                Class::Unknown => {
                    out.unknown.push(tensor);
                    continue;
                }
                Class::Root(name) => name.to_owned(),
                Class::Text(prefix, rest) => {
                    let (first_prefix, first) = *seen.get_or_insert((prefix, entry.name()));
                    if first_prefix != prefix {
                        return Err(Error::MixedPrefixes { first: first.to_owned(), second: entry.name().to_owned() });
                    }
                    out.prefix = prefix;
                    format!("model.{rest}")
                }
            };
            if let Some((module, suffix)) = split_name(&name) {
                out.modules.entry(module.to_owned()).or_default().push((suffix.to_owned(), tensor));
            }
            if let Some((layer, rest)) = name.split_once(EXPERTS)
                && rest.starts_with(|c: char| c.is_ascii_digit())
                && !out.split_experts.contains(layer)
            {
                out.split_experts.insert(layer.to_owned());
            }
            if let Some(other) = out.tensors.insert(name, Named { tensor, used: false }) {
                let first = checkpoint.tensors().get(other.tensor).map_or("", |t| t.name());
                return Err(Error::MixedPrefixes { first: first.to_owned(), second: entry.name().to_owned() });
            }
        }
        Ok(out)
    }

    /// The name in the file, or what it would be, of a normalised name.
    pub(super) fn stored_name(&self, name: &str) -> String {
        match name.strip_prefix("model.") {
            Some(rest) => format!("{}{rest}", self.prefix),
            None if self.prefix == TEXT[1] => format!("{NESTED}{name}"),
            None => name.to_owned(),
        }
    }

    /// Whether any tensor starts with a normalised name.
    pub(super) fn any_under(&self, stem: &str) -> bool {
        self.tensors.keys().any(|name| name.starts_with(stem))
    }

    /// Whether a layer has tensors of single experts.
    pub(super) fn has_split_experts(&self, stem: &str) -> bool {
        self.split_experts.contains(stem.trim_end_matches('.'))
    }

    /// Suffixes and tensors of a module, without marking them used.
    pub(super) fn module(&self, module: &str) -> Option<&[(String, usize)]> {
        self.modules.get(module).map(Vec::as_slice)
    }

    /// Whether there is a tensor of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The tensor of a name, marked used.
    pub(super) fn take(&mut self, name: &str) -> Option<usize> {
        let named = self.tensors.get_mut(name)?;
        named.used = true;
        Some(named.tensor)
    }

    /// Names in the file of all tensors that nothing used, sorted.
    pub(super) fn unused(&self, checkpoint: &Checkpoint) -> NameList {
        let left = self.tensors.values().filter(|n| !n.used).map(|n| n.tensor);
        let mut names: Vec<&str> = left
            .chain(self.unknown.iter().copied())
            .filter_map(|i| Some(checkpoint.tensors().get(i)?.name()))
            .collect();
        names.sort_unstable();
        names.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_classified() {
        let text = |name| match class(name) {
            Class::Text(prefix, rest) => (prefix, rest),
            other => panic!("{name}: {other:?}"),
        };
        assert_eq!(text("model.language_model.norm.weight"), ("model.language_model.", "norm.weight"));
        assert_eq!(text("model.norm.weight"), ("model.", "norm.weight"));
        assert_eq!(text("language_model.model.norm.weight"), ("language_model.model.", "norm.weight"));
        assert_eq!(class("lm_head.weight"), Class::Root("lm_head.weight"));
        assert_eq!(class("language_model.lm_head.weight"), Class::Root("lm_head.weight"));
        assert_eq!(class("mtp.fc.weight"), Class::Root("mtp.fc.weight"));
        assert_eq!(class("model.visual.pos_embed.weight"), Class::Vision);
        assert_eq!(class("model.layers.0.self_attn.k_proj.k_scale"), Class::Activation);
        assert_eq!(class("lm_head.input_scale"), Class::Activation);
        for name in ["", "norm.weight", "mtp", "transformer.h.0.weight", "lm_head"] {
            assert_eq!(class(name), Class::Unknown, "{name}");
        }
    }
}
