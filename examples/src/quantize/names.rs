//! Sets of module names as the patterns that quantisation configurations hold.

use std::collections::{BTreeMap, BTreeSet};

/// Patterns (`re:…`) that match exactly the modules in each class, and no module of another.
///
/// Layers and experts are folded: `re:.*model\.layers\.\d+\.mlp\.experts\.\d+\.gate_proj$`, with the layers listed where a
/// projection has different classes in different layers. What precedes `model.layers` is left open, since engines name the text
/// model differently; the MTP block has patterns of its own. Modules that cannot be told apart so are listed by name.
pub(super) fn patterns<C: Ord + Copy>(modules: impl IntoIterator<Item = (String, C)>) -> BTreeMap<C, Vec<String>> {
    let mut folded: BTreeMap<String, Vec<(Option<usize>, String, C)>> = BTreeMap::new();
    for (name, class) in modules {
        let (pattern, layer) = fold(&name);
        folded.entry(pattern).or_default().push((layer, name, class));
    }
    let mut out: BTreeMap<C, Vec<String>> = BTreeMap::new();
    for (pattern, members) in folded {
        let mut layers: BTreeMap<C, BTreeSet<Option<usize>>> = BTreeMap::new();
        for (layer, _, class) in &members {
            layers.entry(*class).or_default().insert(*layer);
        }
        let total: BTreeSet<_> = members.iter().map(|m| m.0).collect();
        if layers.values().map(BTreeSet::len).sum::<usize>() > total.len() {
            for (_, name, class) in members {
                out.entry(class).or_default().push(name);
            }
            continue;
        }
        let one = layers.len() == 1;
        for (class, layers) in layers {
            let list: Vec<String> = layers.iter().flatten().map(usize::to_string).collect();
            let layer = if one { r"\d+".to_owned() } else { format!("({})", list.join("|")) };
            out.entry(class).or_default().push(pattern.replacen(LAYER, &layer, 1));
        }
    }
    out
}

/// Stands for the layer in a folded name.
const LAYER: &str = "<layer>";

/// A pattern with a gap for the number of the layer, and that number.
fn fold(name: &str) -> (String, Option<usize>) {
    let start = ["mtp.", "model.layers."].iter().find_map(|stem| name.find(stem)).unwrap_or_default();
    let (mut layer, mut parts) = (None, Vec::new());
    let is_mtp = name[start..].starts_with("mtp.");
    let is_text = name[start..].starts_with("model.layers.");
    for part in name[start..].split('.') {
        parts.push(match part.parse::<usize>() {
            Ok(n) if layer.is_none() && is_text => {
                layer = Some(n);
                LAYER.to_owned()
            }
            // The MTP block has one layer; what comes behind is an expert.
            Ok(0) if is_mtp && layer.is_none() => {
                layer = Some(0);
                "0".to_owned()
            }
            Ok(_) => r"\d+".to_owned(),
            Err(_) => part.to_owned(),
        });
    }
    let tail = if is_mtp || is_text { parts.join(r"\.") } else { name.rsplit('.').next().unwrap_or(name).to_owned() };
    (format!("re:.*{tail}$"), layer)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folded(list: &[(&str, u8)]) -> BTreeMap<u8, Vec<String>> {
        patterns(list.iter().map(|&(name, class)| (name.to_owned(), class)))
    }

    #[test]
    fn layers_and_experts_are_folded() {
        let got = folded(&[
            ("model.language_model.layers.0.mlp.experts.0.up_proj", 4),
            ("model.language_model.layers.11.mlp.experts.3.up_proj", 4),
            ("mtp.layers.0.mlp.experts.0.up_proj", 8),
            ("mtp.layers.0.mlp.experts.1.up_proj", 8),
            ("mtp.fc", 8),
            ("lm_head", 8),
        ]);
        assert_eq!(got[&4], [r"re:.*model\.layers\.\d+\.mlp\.experts\.\d+\.up_proj$"]);
        let own = [r"re:.*lm_head$", r"re:.*mtp\.fc$", r"re:.*mtp\.layers\.0\.mlp\.experts\.\d+\.up_proj$"];
        assert_eq!(got[&8], own);
    }

    #[test]
    fn layers_are_listed_where_they_differ() {
        let got = folded(&[
            ("model.layers.0.self_attn.o_proj", 1),
            ("model.layers.4.self_attn.o_proj", 2),
            ("model.layers.8.self_attn.o_proj", 1),
        ]);
        assert_eq!(got[&1], [r"re:.*model\.layers\.(0|8)\.self_attn\.o_proj$"]);
        assert_eq!(got[&2], [r"re:.*model\.layers\.(4)\.self_attn\.o_proj$"]);
    }

    #[test]
    fn names_are_listed_where_layers_do_not_tell() {
        let got = folded(&[("model.layers.0.mlp.experts.0.up_proj", 1), ("model.layers.0.mlp.experts.1.up_proj", 2)]);
        assert_eq!(got[&1], ["model.layers.0.mlp.experts.0.up_proj"]);
        assert_eq!(got[&2], ["model.layers.0.mlp.experts.1.up_proj"]);
    }
}
