//! The header of a safetensors file.
//!
//! A file is eight bytes with the length of the header (little endian), the header (a JSON object from tensor name to
//! dtype, shape and byte range), and the data, which the tensors must cover without gap or overlap. Everything is checked
//! before anything is allocated for data, and every fault names the tensor.

use ninfer_core::DType;
use safetensors::Dtype;
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::pairs::Pairs;

/// Bytes before the header.
pub(super) const LENGTH_BYTES: u64 = 8;
/// Longest header that is read, as in the reference implementation.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Member of the header that is no tensor.
const METADATA: &str = "__metadata__";

/// What is wrong with the header of a safetensors file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderFault {
    /// The file is shorter than the length field.
    #[error("the file has {len} bytes, a header needs at least 8")]
    TooShort {
        /// Bytes of the file.
        len: u64,
    },
    /// The header would be longer than the file, or than anything that is read.
    #[error("the header claims {claimed} bytes, at most {limit} are possible")]
    Length {
        /// Length that the file claims.
        claimed: u64,
        /// Bytes after the length field, or [`MAX_HEADER_BYTES`] if that is less.
        limit: u64,
    },
    /// The header is not a JSON object of tensor descriptions.
    #[error("the header is not readable: {message}")]
    Json {
        /// What the parser said; it names the tensor if it got that far.
        message: String,
    },
    /// A name occurs twice.
    #[error("tensor {tensor} occurs twice")]
    Duplicate {
        /// The name.
        tensor: String,
    },
    /// A tensor has an element type that the format does not define.
    #[error("tensor {tensor} has the unknown dtype {dtype}")]
    UnknownDType {
        /// The tensor.
        tensor: String,
        /// What the header says.
        dtype: String,
    },
    /// The size of a tensor does not fit in 64 bits.
    #[error("tensor {tensor} of shape {shape:?} is larger than any memory")]
    Overflow {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// The byte range of a tensor is not as long as its shape and element type ask for.
    #[error("tensor {tensor} ({dtype} {shape:?}) needs {expected} bytes, its range has {got}")]
    Size {
        /// The tensor.
        tensor: String,
        /// Its element type.
        dtype: String,
        /// Its shape.
        shape: Vec<usize>,
        /// Bytes of shape and element type.
        expected: u64,
        /// Bytes of the range.
        got: u64,
    },
    /// A byte range ends before it starts.
    #[error("tensor {tensor} has the byte range {start}..{end}")]
    Range {
        /// The tensor.
        tensor: String,
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
    },
    /// Bytes before a tensor belong to no tensor.
    #[error("bytes {from}..{to} before tensor {tensor} belong to no tensor")]
    Gap {
        /// The tensor after the gap.
        tensor: String,
        /// First byte of the gap.
        from: u64,
        /// One past the last byte of the gap.
        to: u64,
    },
    /// Two tensors share bytes.
    #[error("tensor {tensor} starts at byte {start}, inside the tensor before it, which ends at {end}")]
    Overlap {
        /// The second tensor.
        tensor: String,
        /// Where it starts.
        start: u64,
        /// Where the first one ends.
        end: u64,
    },
    /// The data ends before the last tensor does.
    #[error("the data has {got} bytes, the tensors need {expected}: the file is truncated")]
    Truncated {
        /// Bytes that the tensors need.
        expected: u64,
        /// Bytes after the header.
        got: u64,
    },
    /// There are bytes after the last tensor.
    #[error("the data has {got} bytes, the tensors cover only {expected}")]
    Trailing {
        /// Bytes that the tensors cover.
        expected: u64,
        /// Bytes after the header.
        got: u64,
    },
}

/// One tensor of a header.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct HeaderTensor {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    /// From the start of the data.
    pub(super) start: u64,
    pub(super) bytes: u64,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Member {
    Tensor { dtype: String, shape: Vec<usize>, data_offsets: (u64, u64) },
    Other(IgnoredAny),
}

/// Checks the claimed length of the header against the length of the file; returns the former.
pub(super) fn header_length(field: [u8; 8], file_len: u64) -> Result<usize, HeaderFault> {
    let claimed = u64::from_le_bytes(field);
    let rest = file_len.checked_sub(LENGTH_BYTES).ok_or(HeaderFault::TooShort { len: file_len })?;
    let limit = rest.min(MAX_HEADER_BYTES);
    match usize::try_from(claimed) {
        Ok(n) if claimed <= limit => Ok(n),
        _ => Err(HeaderFault::Length { claimed, limit }),
    }
}

/// Reads a header; `data_len` is the number of bytes after it.
pub(super) fn parse(header: &[u8], data_len: u64) -> Result<Vec<HeaderTensor>, HeaderFault> {
    let Pairs(members) =
        serde_json::from_slice::<Pairs<Member>>(header).map_err(|e| HeaderFault::Json { message: e.to_string() })?;
    let mut tensors = Vec::with_capacity(members.len());
    for (name, member) in members {
        match member {
            _ if name == METADATA => {}
            Member::Tensor { dtype, shape, data_offsets } => tensors.push(tensor(name, &dtype, shape, data_offsets)?),
            Member::Other(_) => {
                let message = format!("{name:?} has no dtype, shape and data_offsets of the right kind");
                return Err(HeaderFault::Json { message });
            }
        }
    }
    check_names(&tensors)?;
    check_cover(&mut tensors, data_len)?;
    Ok(tensors)
}

fn tensor(name: String, dtype: &str, shape: Vec<usize>, (start, end): (u64, u64)) -> Result<HeaderTensor, HeaderFault> {
    let Ok(parsed) = serde_json::from_value::<Dtype>(dtype.into()) else {
        return Err(HeaderFault::UnknownDType { tensor: name, dtype: dtype.to_owned() });
    };
    let bits = shape.iter().try_fold(parsed.bitsize() as u64, |n, &d| n.checked_mul(d as u64));
    let Some(bits) = bits else {
        return Err(HeaderFault::Overflow { tensor: name, shape });
    };
    let expected = bits.div_ceil(8);
    match end.checked_sub(start) {
        None => Err(HeaderFault::Range { tensor: name, start, end }),
        Some(got) if got != expected => {
            Err(HeaderFault::Size { tensor: name, dtype: dtype.to_owned(), shape, expected, got })
        }
        Some(bytes) => Ok(HeaderTensor { name, dtype: parsed, shape, start, bytes }),
    }
}

fn check_names(tensors: &[HeaderTensor]) -> Result<(), HeaderFault> {
    let mut names: Vec<&str> = tensors.iter().map(|t| t.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|w| w[0] == w[1]) {
        Some(w) => Err(HeaderFault::Duplicate { tensor: w[0].to_owned() }),
        None => Ok(()),
    }
}

/// Puts the tensors in the order of their bytes and checks that these cover the data.
fn check_cover(tensors: &mut [HeaderTensor], data_len: u64) -> Result<(), HeaderFault> {
    tensors.sort_by(|a, b| (a.start, a.bytes, &a.name).cmp(&(b.start, b.bytes, &b.name)));
    let mut covered = 0u64;
    for t in tensors.iter() {
        let tensor = || t.name.clone();
        if t.start > covered {
            return Err(HeaderFault::Gap { tensor: tensor(), from: covered, to: t.start });
        }
        if t.start < covered {
            return Err(HeaderFault::Overlap { tensor: tensor(), start: t.start, end: covered });
        }
        // start + bytes is the end that the header gives, so it fits.
        covered = t.start.saturating_add(t.bytes);
    }
    match covered.cmp(&data_len) {
        std::cmp::Ordering::Greater => Err(HeaderFault::Truncated { expected: covered, got: data_len }),
        std::cmp::Ordering::Less => Err(HeaderFault::Trailing { expected: covered, got: data_len }),
        std::cmp::Ordering::Equal => Ok(()),
    }
}

/// The element type of this workspace, if there is one for it.
pub(super) fn core_dtype(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::Bf16,
        Dtype::F8_E4M3 => DType::F8E4M3,
        Dtype::U8 => DType::U8,
        Dtype::I8 => DType::I8,
        Dtype::I32 => DType::I32,
        Dtype::U32 => DType::U32,
        Dtype::I64 => DType::I64,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn one(name: &str, dtype: &str, shape: &str, start: u64, end: u64) -> String {
        format!("{name:?}:{{\"dtype\":\"{dtype}\",\"shape\":{shape},\"data_offsets\":[{start},{end}]}}")
    }

    fn parse_members(members: &[String], data_len: u64) -> Result<Vec<HeaderTensor>, HeaderFault> {
        parse(format!("{{{}}}", members.join(",")).as_bytes(), data_len)
    }

    #[test]
    fn good_headers_are_read_in_the_order_of_their_bytes() {
        let members = [
            "\"__metadata__\":{\"format\":\"pt\"}".to_owned(),
            one("b", "BF16", "[3]", 4, 10),
            one("a", "F32", "[]", 0, 4),
            one("empty", "I64", "[0,7]", 4, 4),
        ];
        let tensors = parse_members(&members, 10).unwrap();
        let names: Vec<&str> = tensors.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names, ["a", "empty", "b"]);
        assert_eq!((tensors[2].start, tensors[2].bytes, tensors[2].shape.as_slice()), (4, 6, &[3][..]));
        assert_eq!(parse(b"{}  ", 0).unwrap(), []);
    }

    #[test]
    fn every_fault_is_told_apart() {
        let a = || one("a", "F32", "[2]", 0, 8);
        let cases: Vec<(Vec<String>, u64, &str)> = vec![
            (vec![a(), one("b", "F32", "[1]", 12, 16)], 16, "bytes 8..12 before tensor b belong to no tensor"),
            (vec![a(), one("b", "F32", "[1]", 4, 8)], 8, "tensor b starts at byte 4, inside"),
            (vec![a(), a()], 8, "tensor a occurs twice"),
            (vec![one("a", "F32", "[2]", 8, 0)], 8, "tensor a has the byte range 8..0"),
            (vec![one("a", "F32", "[3]", 0, 8)], 8, "tensor a (F32 [3]) needs 12 bytes, its range has 8"),
            (vec![one("a", "F99", "[2]", 0, 8)], 8, "tensor a has the unknown dtype F99"),
            (vec![one("a", "F32", "[4294967296,4294967296]", 0, 8)], 8, "larger than any memory"),
            (vec![a()], 7, "truncated"),
            (vec![a()], 9, "the tensors cover only 8"),
            (vec![one("a", "F32", "[-1]", 0, 8)], 8, "\"a\" has no dtype, shape"),
            (vec![one("a", "F32", "[1.5]", 0, 8)], 8, "\"a\" has no dtype, shape"),
            (vec!["\"a\":7".to_owned()], 8, "\"a\" has no dtype, shape"),
            (vec!["\"a\":{\"dtype\":\"F32\"}".to_owned()], 8, "\"a\" has no dtype, shape"),
            (vec!["\"a\":".to_owned()], 8, "not readable"),
        ];
        for (members, data_len, expected) in cases {
            let message = parse_members(&members, data_len).unwrap_err().to_string();
            assert!(message.contains(expected), "{members:?}: {message}");
        }
        assert!(matches!(parse(b"\xff\xfe", 0), Err(HeaderFault::Json { .. })));
        assert!(matches!(parse(b"[]", 0), Err(HeaderFault::Json { .. })));
        assert!(matches!(parse("[".repeat(100_000).as_bytes(), 0), Err(HeaderFault::Json { .. })));
    }

    #[test]
    fn absurd_lengths_are_refused_before_anything_is_read() {
        assert_eq!(header_length(10u64.to_le_bytes(), 18), Ok(10));
        assert_eq!(header_length(11u64.to_le_bytes(), 18), Err(HeaderFault::Length { claimed: 11, limit: 10 }));
        assert_eq!(
            header_length(u64::MAX.to_le_bytes(), u64::MAX),
            Err(HeaderFault::Length { claimed: u64::MAX, limit: MAX_HEADER_BYTES })
        );
        assert_eq!(header_length([0; 8], 7), Err(HeaderFault::TooShort { len: 7 }));
    }

    fn valid_header() -> impl Strategy<Value = (Vec<u8>, u64)> {
        let shape = proptest::collection::vec(0usize..5, 0..4);
        let dtype = prop_oneof![Just(("F32", 4u64)), Just(("BF16", 2)), Just(("U8", 1)), Just(("I64", 8))];
        proptest::collection::vec((dtype, shape), 0..6).prop_map(|list| {
            let mut at = 0;
            let members: Vec<String> = list
                .into_iter()
                .enumerate()
                .map(|(i, ((dtype, size), shape))| {
                    let start = at;
                    at += shape.iter().product::<usize>() as u64 * size;
                    one(&format!("t{i}"), dtype, &format!("{shape:?}"), start, at)
                })
                .collect();
            (format!("{{{}}}", members.join(",")).into_bytes(), at)
        })
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), len: u64) {
            let _ = parse(&bytes, len);
        }

        #[test]
        fn valid_headers_are_accepted((header, len) in valid_header()) {
            prop_assert!(parse(&header, len).is_ok());
        }

        #[test]
        fn mutated_headers_never_panic_and_never_reach_outside(
            (mut header, len) in valid_header(),
            flips in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..6),
        ) {
            for (at, byte) in flips {
                let at = at.index(header.len());
                header[at] = byte;
            }
            if let Ok(tensors) = parse(&header, len) {
                for t in tensors {
                    prop_assert!(t.start + t.bytes <= len);
                }
            }
        }

        #[test]
        fn random_digits_in_a_header_never_panic(numbers in proptest::collection::vec(any::<u64>(), 4), len: u64) {
            let [a, b, c, d] = numbers[..] else { unreachable!() };
            let _ = parse_members(&[one("x", "BF16", &format!("[{a},{b}]"), c, d)], len);
        }
    }
}
