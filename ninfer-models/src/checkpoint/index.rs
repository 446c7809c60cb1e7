//! `model.safetensors.index.json`: which shard holds which tensor.

use std::collections::{BTreeMap, HashSet};
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;

use super::pairs::Pairs;
use super::read_text;
use crate::{Error, Result};

/// Largest index that is read.
const MAX_INDEX_BYTES: u64 = 100_000_000;

#[derive(Deserialize)]
struct Stored {
    weight_map: Pairs<String>,
}

/// Shards by file name, each with the tensors that the index places there.
pub(super) struct Index(pub(super) BTreeMap<String, Vec<String>>);

impl Index {
    pub(super) fn read(file: &Path) -> Result<Self> {
        Self::parse(&read_text(file, MAX_INDEX_BYTES)?, file)
    }

    fn parse(text: &str, file: &Path) -> Result<Self> {
        let Stored { weight_map: Pairs(pairs) } =
            serde_json::from_str(text).map_err(|e| Error::Json { file: file.to_owned(), message: e.to_string() })?;
        let mut shards: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let mut seen = HashSet::with_capacity(pairs.len());
        for (tensor, entry) in pairs {
            if !seen.insert(tensor.clone()) {
                return Err(Error::DuplicateTensor { tensor, first: file.to_owned(), second: file.to_owned() });
            }
            if let Some(reason) = refuse_name(&entry) {
                return Err(Error::UnsafePath { tensor, entry, reason });
            }
            shards.entry(entry).or_default().push(tensor);
        }
        Ok(Self(shards))
    }
}

/// Why a file name of the index is refused, judged by the name alone.
fn refuse_name(entry: &str) -> Option<&'static str> {
    let mut components = Path::new(entry).components();
    let plain = matches!((components.next(), components.next()), (Some(Component::Normal(_)), None));
    if plain && !entry.contains(['/', '\\', ':', '\0']) {
        None
    } else {
        Some("it is not the name of a file in the folder of the index")
    }
}

/// The path of a shard, if what lies there is a file of this checkpoint.
///
/// A symbolic link may stay in the folder. It may leave it only as the download cache of the model hub lays files out:
/// `…/snapshots/<revision>/<name>` links to `…/blobs/<hash>`.
pub(super) fn locate(dir: &Path, entry: &str, tensor: &str) -> Result<PathBuf> {
    let path = dir.join(entry);
    let missing = || Error::MissingShard { file: path.clone(), tensor: tensor.to_owned() };
    let meta = std::fs::symlink_metadata(&path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => missing(),
        _ => Error::io(&path, "read", &e),
    })?;
    if !meta.is_symlink() {
        return Ok(path);
    }
    let real = |p: &Path| match p.canonicalize() {
        Ok(p) => Ok(p),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Err(missing()),
        Err(e) => Err(Error::io(p, "resolve", &e)),
    };
    let (target, home) = (real(&path)?, real(dir)?);
    let blobs = home
        .parent()
        .filter(|p| p.file_name().is_some_and(|n| n == "snapshots"))
        .and_then(Path::parent)
        .map(|cache| cache.join("blobs"));
    if target.parent() == Some(home.as_path()) || (blobs.is_some() && target.parent() == blobs.as_deref()) {
        return Ok(path);
    }
    let reason = "it is a symbolic link to a place outside the folder";
    Err(Error::UnsafePath { tensor: tensor.to_owned(), entry: entry.to_owned(), reason })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> Result<Index> {
        Index::parse(text, Path::new("model.safetensors.index.json"))
    }

    #[test]
    fn shards_have_any_plain_name() {
        let index = parse(
            r#"{"metadata":{"total_size":1},"weight_map":{"a":"layers-0.safetensors","b":"mtp","c":"layers-0.safetensors"}}"#,
        )
        .unwrap();
        let names: Vec<(&str, usize)> = index.0.iter().map(|(k, v)| (k.as_str(), v.len())).collect();
        assert_eq!(names, [("layers-0.safetensors", 2), ("mtp", 1)]);
    }

    #[test]
    fn names_that_leave_the_folder_are_refused() {
        for entry in ["../x", "/etc/passwd", "a/b", "a/../b", "..", ".", "", "./x", "C:x", "a\\\\b", "x/"] {
            let error = parse(&format!(r#"{{"weight_map":{{"t":"{entry}"}}}}"#)).err().unwrap();
            assert!(matches!(&error, Error::UnsafePath { tensor, .. } if tensor == "t"), "{entry}: {error}");
        }
    }

    #[test]
    fn a_tensor_twice_is_refused() {
        let error = parse(r#"{"weight_map":{"t":"a","t":"b"}}"#).err().unwrap();
        assert!(matches!(error, Error::DuplicateTensor { tensor, .. } if tensor == "t"));
    }

    #[test]
    fn what_is_no_index_is_refused() {
        for text in ["", "[]", "{}", r#"{"weight_map":[]}"#, r#"{"weight_map":{"t":7}}"#] {
            assert!(matches!(parse(text), Err(Error::Json { .. })), "{text}");
        }
    }

    proptest! {
        #[test]
        fn random_text_never_panics(text in ".{0,200}", entry in ".{0,40}") {
            let _ = parse(&text);
            let quoted = serde_json::to_string(&entry).unwrap();
            if let Ok(index) = parse(&format!("{{\"weight_map\":{{\"t\":{quoted}}}}}")) {
                for name in index.0.keys() {
                    let path = Path::new("dir").join(name);
                    prop_assert_eq!(path.parent(), Some(Path::new("dir")));
                }
            }
        }
    }
}
