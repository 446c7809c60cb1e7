//! The rotary keys of a configuration.

use ninfer_core::shape::MAX_DIM;

use super::section::Section;
use crate::rope::{Rope, RopeScaling, yarn_mscale};
use crate::{Error, Result};

const DEFAULT_PARTIAL: f64 = 0.25;
const DEFAULT_BETA_FAST: f64 = 32.0;
const DEFAULT_BETA_SLOW: f64 = 1.0;

/// Sections that may hold a rotary key, the first that has it wins: `rope_parameters`, the older `rope_scaling`, and the
/// text section itself.
struct Sources<'a>(Vec<Section<'a>>);

impl<'a> Sources<'a> {
    fn of(&self, key: &str) -> Option<Section<'a>> {
        self.0.iter().copied().find(|s| s.get(key).is_some())
    }

    fn number(&self, key: &str) -> Result<Option<f64>> {
        self.of(key).map_or(Ok(None), |s| s.number(key))
    }

    /// The error of a key, named after the section that has it.
    fn illegal(&self, key: &str, legal: &str) -> Error {
        match self.of(key) {
            Some(s) => s.illegal(key, legal),
            None => Error::ConfigMissing { key: format!("rope_parameters.{key}") },
        }
    }
}

/// Reads the rotary embedding of heads with `head_dim` features.
pub(super) fn read(text: Section<'_>, head_dim: usize, max_positions: usize) -> Result<Rope> {
    let names = ["rope_parameters", "rope_scaling"].map(|k| (k, text.name(k)));
    let mut list = Vec::new();
    for (key, name) in &names {
        if let Some(map) = text.object(key)? {
            list.push(Section::new(name, map));
        }
    }
    list.push(text);
    let keys = Sources(list);

    let theta = keys.number("rope_theta")?.ok_or_else(|| keys.illegal("rope_theta", ""))?;
    if theta <= 1.0 || theta > f64::from(f32::MAX) {
        return Err(keys.illegal("rope_theta", "numbers above 1 that fit in f32"));
    }
    let partial = keys.number("partial_rotary_factor")?.unwrap_or(DEFAULT_PARTIAL);
    let rotary_dim = (head_dim as f64 * partial) as usize;
    if partial <= 0.0 || partial > 1.0 || rotary_dim < 2 || !rotary_dim.is_multiple_of(2) {
        return Err(Error::ConfigValue {
            key: text.name("rope_parameters.partial_rotary_factor"),
            got: format!("{partial}, which rotates {rotary_dim} of {head_dim} features"),
            legal: "factors that rotate an even number of features, 2 or more".to_owned(),
        });
    }
    let kind = match keys.of("rope_type") {
        Some(s) => s.string("rope_type")?,
        None => keys.of("type").map_or(Ok(None), |s| s.string("type"))?,
    };
    let scaling = match kind {
        None | Some("default") => RopeScaling::None,
        Some("yarn") => yarn(&keys, max_positions)?,
        Some(other) => {
            return Err(Error::ConfigValue {
                key: text.name("rope_parameters.rope_type"),
                got: format!("{other:?}"),
                legal: "\"default\", \"yarn\"".to_owned(),
            });
        }
    };
    Ok(Rope { theta, rotary_dim, scaling })
}

fn yarn(keys: &Sources<'_>, max_positions: usize) -> Result<RopeScaling> {
    const ORIGINAL: &str = "original_max_position_embeddings";
    let positive = |key: &str| -> Result<Option<f64>> {
        match keys.number(key)? {
            Some(x) if x <= 0.0 || x > f64::from(f32::MAX) => Err(keys.illegal(key, "positive numbers")),
            x => Ok(x),
        }
    };
    let original_positions = keys
        .of(ORIGINAL)
        .map_or(Ok(None), |s| s.size_to(ORIGINAL, MAX_DIM))?
        .ok_or_else(|| keys.illegal(ORIGINAL, ""))?;
    let factor = positive("factor")?.unwrap_or(max_positions as f64 / original_positions as f64);
    if factor < 1.0 {
        return Err(keys.illegal("factor", "numbers from 1 up"));
    }
    let attention_factor = match (positive("attention_factor")?, positive("mscale")?, positive("mscale_all_dim")?) {
        (Some(given), ..) => given,
        (None, Some(one), Some(all)) => yarn_mscale(factor, one) / yarn_mscale(factor, all),
        _ => yarn_mscale(factor, 1.0),
    };
    let truncate = keys.of("truncate").map_or(Ok(None), |s| s.bool("truncate"))?.unwrap_or(true);
    Ok(RopeScaling::Yarn {
        factor,
        original_positions,
        attention_factor,
        beta_fast: positive("beta_fast")?.unwrap_or(DEFAULT_BETA_FAST),
        beta_slow: positive("beta_slow")?.unwrap_or(DEFAULT_BETA_SLOW),
        truncate,
    })
}
