//! The model that comes with the examples.

use std::path::{Path, PathBuf};

use crate::{Failure, Result};

/// Folder of the shipped model inside `models`.
const NAME: &str = "rustdoc-moe-14m";
/// Its documents that were held out in training.
const HELD_OUT: &str = "heldout.json";

/// The folder that was named, or that of the shipped model.
///
/// # Errors
/// [`Failure::NoShippedModel`] with the places tried.
pub fn model_or_shipped(named: Option<&Path>) -> Result<PathBuf> {
    match named {
        Some(dir) => Ok(dir.to_owned()),
        None => find(candidates()),
    }
}

/// The held-out documents of the shipped model, a JSON list of strings.
///
/// # Errors
/// [`Failure::NoShippedModel`] with the places tried.
pub fn held_out_documents() -> Result<PathBuf> {
    Ok(find(candidates())?.join(HELD_OUT))
}

fn find(places: Vec<PathBuf>) -> Result<PathBuf> {
    let is_model = |dir: &&PathBuf| dir.join("config.json").is_file();
    if let Some(dir) = places.iter().find(is_model) {
        return Ok(dir.clone());
    }
    let places: Vec<String> = places.iter().map(|p| p.display().to_string()).collect();
    Err(Failure::NoShippedModel { places: places.join(", ") })
}

/// Beside the sources this program was built from, then beside the executable and in the folders above it, then in the
/// working folder.
fn candidates() -> Vec<PathBuf> {
    let inside = |dir: &Path| [dir.join("models").join(NAME), dir.join("examples").join("models").join(NAME)];
    let mut places = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("models").join(NAME)];
    let executable = std::env::current_exe().ok();
    let folders = executable.iter().flat_map(|file| file.ancestors().skip(1).take(4));
    for place in folders.chain([Path::new(".")]).flat_map(inside) {
        if !places.contains(&place) {
            places.push(place);
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shipped_model_is_found_and_a_name_wins() {
        assert!(model_or_shipped(None).unwrap().ends_with(NAME));
        assert!(held_out_documents().unwrap().is_file());
        assert_eq!(model_or_shipped(Some(Path::new("x"))).unwrap(), Path::new("x"));
    }

    #[test]
    fn the_places_tried_are_named() {
        let error = find(vec!["no/a".into(), "no/b".into()]).unwrap_err().to_string();
        assert!(error.contains("no/a, no/b"), "{error}");
    }
}
