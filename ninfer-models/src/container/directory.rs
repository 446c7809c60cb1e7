//! The directory of a container: what its JSON says, and that all of it can be true.

use std::collections::HashSet;

use ninfer_quant::container::{ALIGNMENT, ContainerFormat};
use serde::Deserialize;

/// Bytes before the JSON: seven of the magic, the version, and the length of the JSON (little endian).
pub(super) const PREFIX_BYTES: usize = 16;
const MAGIC: [u8; 7] = *b"NINFER\0";
/// Versions that are read.
const VERSIONS: [u8; 2] = [1, 2];
/// The payload starts at the next multiple of this behind the JSON.
const PAYLOAD_ALIGNMENT: u64 = 4096;
/// Longest JSON that is read.
pub const MAX_DIRECTORY_BYTES: u64 = 100_000_000;
/// The one encoding of resources.
const RAW: &str = "raw-bytes-v1";

/// What is wrong with the directory of a container.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DirectoryFault {
    /// The file does not begin with the magic.
    #[error("this is no container: the file does not begin with NINFER and a zero byte")]
    Magic,
    /// A version that is not read.
    #[error("container version {got} is not read, 1 and 2 are")]
    Version {
        /// Version of the file.
        got: u8,
    },
    /// The JSON would be longer than the file, or than anything that is read, or it is empty.
    #[error("the directory claims {claimed} bytes, 1 to {limit} are possible")]
    Length {
        /// Length that the file claims.
        claimed: u64,
        /// Most that is possible.
        limit: u64,
    },
    /// The directory is not the JSON that it must be.
    #[error("the directory is not readable: {message}")]
    Json {
        /// What the parser said.
        message: String,
    },
    /// A name occurs twice.
    #[error("object {object:?} occurs twice")]
    Duplicate {
        /// The name.
        object: String,
    },
    /// A member of an object is missing, does not belong to its kind, or has a value that is not known.
    #[error("object {object:?}: {member} is {got}, expected {expected}")]
    Member {
        /// The object.
        object: String,
        /// Its member.
        member: &'static str,
        /// What it is.
        got: String,
        /// What it may be.
        expected: String,
    },
    /// A format cannot have the shape.
    #[error("object {object:?} of format {format} cannot have shape {shape:?}")]
    Shape {
        /// The object.
        object: String,
        /// Its format.
        format: &'static str,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// An object is not as long as format and shape ask for.
    #[error("object {object:?} has {got} bytes, its format and shape need {expected}")]
    Size {
        /// The object.
        object: String,
        /// Bytes needed.
        expected: u64,
        /// Bytes stated.
        got: u64,
    },
    /// A tensor does not start at a multiple of 256.
    #[error("object {object:?} starts at byte {offset}, which is no multiple of {ALIGNMENT}")]
    Alignment {
        /// The object.
        object: String,
        /// Where it starts.
        offset: u64,
    },
    /// Objects share bytes, or are not in the order of their bytes.
    #[error("object {object:?} starts at byte {start}, before the end {end} of the object listed before it")]
    Overlap {
        /// The object.
        object: String,
        /// Where it starts.
        start: u64,
        /// Where the one before ends.
        end: u64,
    },
    /// The file ends before an object does.
    #[error("object {object:?} ends at byte {end} of the payload, which has {got}: the file is truncated")]
    Truncated {
        /// The object.
        object: String,
        /// One past its last byte.
        end: u64,
        /// Bytes of the payload.
        got: u64,
    },
}

/// What an object holds.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ObjectKind {
    /// Numbers.
    #[non_exhaustive]
    Tensor {
        /// Number format, which has one layout.
        format: ContainerFormat,
        /// Shape; empty for one number.
        shape: Vec<usize>,
    },
    /// Bytes of a file.
    Resource,
}

/// An object of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    pub(super) name: String,
    pub(super) kind: ObjectKind,
    /// From the start of the file.
    pub(super) start: u64,
    pub(super) bytes: u64,
}

impl Object {
    /// The name, for example `text/layers/0/mlp/down`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it holds.
    #[must_use]
    pub fn kind(&self) -> &ObjectKind {
        &self.kind
    }

    /// Bytes it has.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// A directory that was checked.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Directory {
    pub(super) model_id: String,
    pub(super) weights_id: Option<String>,
    pub(super) objects: Vec<Object>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Root {
    model_id: Option<String>,
    identity: Option<Identity>,
    objects: Vec<Member>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Identity {
    model_id: String,
    weights_id: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Member {
    name: String,
    kind: String,
    shape: Option<Vec<usize>>,
    format: Option<String>,
    layout: Option<String>,
    encoding: Option<String>,
    offset: u64,
    bytes: u64,
}

/// Version and length of the JSON, from the first bytes of a file.
pub(super) fn prefix(bytes: [u8; PREFIX_BYTES], file_len: u64) -> Result<usize, DirectoryFault> {
    let (magic, version, length) = (&bytes[..7], bytes[7], &bytes[8..]);
    if magic != MAGIC {
        return Err(DirectoryFault::Magic);
    }
    if !VERSIONS.contains(&version) {
        return Err(DirectoryFault::Version { got: version });
    }
    let claimed = length.iter().rev().fold(0u64, |n, &b| (n << 8) | u64::from(b));
    let limit = file_len.saturating_sub(PREFIX_BYTES as u64).min(MAX_DIRECTORY_BYTES);
    match usize::try_from(claimed) {
        Ok(n) if (1..=limit).contains(&claimed) => Ok(n),
        _ => Err(DirectoryFault::Length { claimed, limit }),
    }
}

/// Reads the JSON of a file of `file_len` bytes.
pub(super) fn parse(json: &[u8], file_len: u64) -> Result<Directory, DirectoryFault> {
    let unreadable = |message: String| DirectoryFault::Json { message };
    let root: Root = serde_json::from_slice(json).map_err(|e| unreadable(e.to_string()))?;
    let (model_id, weights_id) = match (root.model_id, root.identity) {
        (Some(model), None) => (model, None),
        (None, Some(Identity { model_id, weights_id })) => (model_id, Some(weights_id)),
        _ => return Err(unreadable("there must be either `model_id` or `identity`".to_owned())),
    };
    if model_id.is_empty() || weights_id.as_ref().is_some_and(String::is_empty) || root.objects.is_empty() {
        return Err(unreadable("identity or list of objects is empty".to_owned()));
    }
    // Neither sum overflows: the JSON is in memory, and offsets are checked against the payload below.
    let payload = (PREFIX_BYTES as u64 + json.len() as u64).next_multiple_of(PAYLOAD_ALIGNMENT);
    let payload_bytes = file_len.saturating_sub(payload);
    let mut seen = HashSet::with_capacity(root.objects.len());
    let mut objects = Vec::with_capacity(root.objects.len());
    let mut end = 0u64;
    for member in root.objects {
        if member.name.is_empty() || !seen.insert(member.name.clone()) {
            return Err(DirectoryFault::Duplicate { object: member.name });
        }
        let (offset, bytes) = (member.offset, member.bytes);
        let (name, kind) = object(member)?;
        if offset < end {
            return Err(DirectoryFault::Overlap { object: name, start: offset, end });
        }
        end = offset.saturating_add(bytes);
        if end > payload_bytes {
            return Err(DirectoryFault::Truncated { object: name, end, got: payload_bytes });
        }
        objects.push(Object { name, kind, start: payload + offset, bytes });
    }
    Ok(Directory { model_id, weights_id, objects })
}

/// Checks one object by itself.
fn object(m: Member) -> Result<(String, ObjectKind), DirectoryFault> {
    let bad = |member: &'static str, got: Option<&str>, expected: String| {
        let got = got.map_or_else(|| "missing or of the other kind".to_owned(), |g| format!("{g:?}"));
        Err(DirectoryFault::Member { object: m.name.clone(), member, got, expected })
    };
    match m.kind.as_str() {
        "resource" => {
            if m.shape.is_some() || m.format.is_some() || m.layout.is_some() {
                return bad("shape, format or layout", Some("given"), "none for a resource".to_owned());
            }
            if m.encoding.as_deref() != Some(RAW) {
                return bad("encoding", m.encoding.as_deref(), RAW.to_owned());
            }
            if m.bytes == 0 {
                return Err(DirectoryFault::Size { object: m.name, expected: 1, got: 0 });
            }
            Ok((m.name, ObjectKind::Resource))
        }
        "tensor" => {
            if m.encoding.is_some() {
                return bad("encoding", m.encoding.as_deref(), "none for a tensor".to_owned());
            }
            let Some(format) = m.format.as_deref().and_then(ContainerFormat::from_name) else {
                let known = ContainerFormat::ALL.map(ContainerFormat::name).join(", ");
                return bad("format", m.format.as_deref(), known);
            };
            if m.layout.as_deref() != Some(format.layout()) {
                return bad("layout", m.layout.as_deref(), format.layout().to_owned());
            }
            let Some(shape) = m.shape else { return bad("shape", None, "a list of sizes".to_owned()) };
            let Some(expected) = format.object_bytes(&shape) else {
                return Err(DirectoryFault::Shape { object: m.name, format: format.name(), shape });
            };
            if m.bytes != expected {
                return Err(DirectoryFault::Size { object: m.name, expected, got: m.bytes });
            }
            if !m.offset.is_multiple_of(ALIGNMENT) {
                return Err(DirectoryFault::Alignment { object: m.name, offset: m.offset });
            }
            Ok((m.name, ObjectKind::Tensor { format, shape }))
        }
        other => bad("kind", Some(other), "\"tensor\" or \"resource\"".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tensor(name: &str, format: &str, shape: &str, offset: u64, bytes: u64) -> String {
        let layout = ContainerFormat::from_name(format).map_or("contiguous-le-v1", ContainerFormat::layout);
        format!(
            r#"{{"name":"{name}","kind":"tensor","shape":{shape},"format":"{format}","layout":"{layout}","offset":{offset},"bytes":{bytes}}}"#
        )
    }

    fn resource(name: &str, offset: u64, bytes: u64) -> String {
        format!(r#"{{"name":"{name}","kind":"resource","encoding":"raw-bytes-v1","offset":{offset},"bytes":{bytes}}}"#)
    }

    fn root(objects: &[String]) -> String {
        format!(r#"{{"identity":{{"model_id":"m","weights_id":"w"}},"objects":[{}]}}"#, objects.join(","))
    }

    fn check(objects: &[String], payload: u64) -> Result<Directory, DirectoryFault> {
        let json = root(objects);
        parse(json.as_bytes(), 4096 * (1 + json.len() as u64 / 4096) + payload)
    }

    #[test]
    fn a_good_directory_is_read() {
        let objects = [
            resource("frontend/tokenizer.json", 0, 7),
            tensor("a", "Q4G64_F16S", "[1,1]", 256, 260),
            tensor("b", "FP32", "[]", 768, 4),
            tensor("c", "BF16", "[3,5]", 1024, 30),
        ];
        let d = check(&objects, 1054).unwrap();
        assert_eq!((d.model_id.as_str(), d.weights_id.as_deref(), d.objects.len()), ("m", Some("w"), 4));
        assert_eq!((d.objects[0].start, d.objects[1].start, d.objects[1].bytes), (4096, 4096 + 256, 260));
        assert_eq!(d.objects[0].kind, ObjectKind::Resource);
        assert_eq!(check(&objects, 1053), Err(DirectoryFault::Truncated { object: "c".into(), end: 1054, got: 1053 }));
        // The first version has the model alone.
        let first = format!(r#"{{"model_id":"m","objects":[{}]}}"#, objects[0]);
        assert_eq!(parse(first.as_bytes(), 9000).unwrap().weights_id, None);
    }

    #[test]
    fn every_fault_is_told_apart() {
        let a = || tensor("a", "FP32", "[2]", 0, 8);
        let cases: Vec<(Vec<String>, &str)> = vec![
            (vec![a(), a()], "\"a\" occurs twice"),
            (vec![a(), tensor("b", "FP32", "[1]", 256, 8)], "\"b\" has 8 bytes, its format and shape need 4"),
            (vec![a(), tensor("b", "FP32", "[1]", 8, 4)], "\"b\" starts at byte 8, which is no multiple of 256"),
            (vec![tensor("z", "FP32", "[65]", 0, 260), tensor("b", "FP32", "[1]", 256, 4)], "before the end 260"),
            (vec![tensor("a", "Q9", "[2]", 0, 8)], "format is \"Q9\""),
            (vec![a().replace("contiguous-le-v1", "row-scale-v1")], "layout is \"row-scale-v1\""),
            (vec![tensor("a", "Q4G64_F16S", "[2]", 0, 8)], "cannot have shape [2]"),
            (vec![tensor("a", "NVFP4", "[64,64]", 0, 8)], "cannot have shape [64, 64]"),
            (vec![tensor("a", "BF16", "[4294967296,4294967296,4]", 0, 8)], "cannot have shape"),
            (vec![tensor("a", "BF16", "[0]", 0, 0)], "cannot have shape [0]"),
            (vec![tensor("a", "BF16", "[-1]", 0, 2)], "not readable"),
            (vec![a().replace("\"kind\":\"tensor\"", "\"kind\":\"view\"")], "kind is \"view\""),
            (vec![a().replace("\"offset\":0", "\"offset\":0,\"x\":1")], "unknown field `x`"),
            (vec![a().replace("\"offset\":0", "\"offset\":0,\"encoding\":\"raw-bytes-v1\"")], "none for a tensor"),
            (vec![resource("a", 0, 1).replace("raw-bytes-v1", "gzip")], "encoding is \"gzip\""),
            (vec![resource("a", 0, 0)], "0 bytes"),
            (vec![resource("a", u64::MAX, 2)], "truncated"),
            (vec![resource("a", 0, u64::MAX)], "truncated"),
            (vec![], "empty"),
        ];
        for (objects, expected) in cases {
            let message = check(&objects, 4096).unwrap_err().to_string();
            assert!(message.contains(expected), "{objects:?}: {message}");
        }
        for json in ["", "[]", "{}", r#"{"model_id":"m","identity":{"model_id":"m","weights_id":"w"},"objects":[]}"#] {
            assert!(matches!(parse(json.as_bytes(), 9000), Err(DirectoryFault::Json { .. })), "{json}");
        }
        assert!(matches!(parse("[".repeat(100_000).as_bytes(), 1 << 20), Err(DirectoryFault::Json { .. })));
    }

    #[test]
    fn prefixes_are_checked_before_anything_is_read() {
        let with = |version: u8, length: u64| {
            let mut bytes = [0; 16];
            bytes[..7].copy_from_slice(b"NINFER\0");
            bytes[7] = version;
            bytes[8..].copy_from_slice(&length.to_le_bytes());
            bytes
        };
        assert_eq!(prefix(with(1, 10), 26), Ok(10));
        assert_eq!(prefix(with(2, 11), 26), Err(DirectoryFault::Length { claimed: 11, limit: 10 }));
        assert_eq!(prefix(with(2, 0), 26), Err(DirectoryFault::Length { claimed: 0, limit: 10 }));
        assert_eq!(
            prefix(with(2, u64::MAX), u64::MAX),
            Err(DirectoryFault::Length { claimed: u64::MAX, limit: MAX_DIRECTORY_BYTES })
        );
        assert_eq!(prefix(with(3, 10), 26), Err(DirectoryFault::Version { got: 3 }));
        assert_eq!(prefix([0; 16], 26), Err(DirectoryFault::Magic));
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), len: u64) {
            let _ = parse(&bytes, len);
        }

        #[test]
        fn mutated_directories_never_panic_and_never_reach_outside(
            flips in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..5),
        ) {
            let objects =
                [resource("r", 0, 7), tensor("a", "Q5G64_F16S", "[2,130]", 256, 528), tensor("b", "I32", "[3]", 1024, 12)];
            let mut json = root(&objects).into_bytes();
            let len = 4096 + 1036;
            for (at, byte) in flips {
                let at = at.index(json.len());
                json[at] = byte;
            }
            if let Ok(d) = parse(&json, len) {
                for o in d.objects {
                    prop_assert!(o.start + o.bytes <= len);
                }
            }
        }

        #[test]
        fn random_numbers_never_panic(a: u64, b: u64, c: u64, d: u64, len: u64, pick in 0usize..9) {
            let format = ContainerFormat::ALL[pick].name();
            let json = root(&[tensor("x", format, &format!("[{a},{b}]"), c, d)]);
            let _ = parse(json.as_bytes(), len);
        }
    }
}
