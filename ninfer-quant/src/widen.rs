//! Groupwise integers in a wider format, with the same weights.

use ninfer_core::format::{GROUP_PAD, GroupFormat};

use crate::groupwise::{Planes, pack_group, unpack_group};
use crate::{Error, PackedMatrix, PackedParts, Result};

/// The same weights in a format with at least as many bits: codes and scales are copied, a group of 64 columns becomes two
/// groups of 32 with its scale.
///
/// It makes matrices joinable ([`PackedMatrix::concat_rows`]) whose rows were stored in different groupwise formats.
///
/// # Errors
/// [`Error::Conversion`] if the matrix is not groupwise or has more bits than `to`.
///
/// ```
/// use ninfer_core::WeightFormat;
/// use ninfer_core::format::GroupFormat;
/// use ninfer_quant::{encode, widen};
/// let w: Vec<f32> = (0..200).map(|i| (i as f32 - 100.0) / 7.0).collect();
/// let q4 = encode(WeightFormat::Group(GroupFormat::Q4), 2, 100, &w)?;
/// let q5 = widen(&q4, GroupFormat::Q5)?;
/// assert_eq!((q5.format(), q5.dequantize()), (WeightFormat::Group(GroupFormat::Q5), q4.dequantize()));
/// assert!(widen(&q5, GroupFormat::Q4).is_err());
/// # Ok::<(), ninfer_quant::Error>(())
/// ```
pub fn widen(m: &PackedMatrix, to: GroupFormat) -> Result<PackedMatrix> {
    let refused = Error::Conversion { conversion: "widening groupwise integers", stored: m.format() };
    let PackedParts::Group { format: from, base, high, scales } = m.parts() else { return Err(refused) };
    let from = *from;
    if from == to {
        return Ok(m.clone());
    }
    if from.bits() > to.bits() {
        return Err(refused);
    }
    let (rows, cols) = (m.rows(), m.cols());
    let mut out = Planes::zeroed(to, rows, cols);
    // W8 halves the groups; between the others they stay.
    let split = from.group_size() / to.group_size();
    let groups = rows * (cols.next_multiple_of(GROUP_PAD) / from.group_size());
    let bytes = from.high_bytes();
    for at in 0..groups {
        let codes = unpack_group(from, &base[32 * at..32 * (at + 1)], &high[bytes * at..bytes * (at + 1)]);
        let scale = u16::from_le_bytes([scales[2 * at], scales[2 * at + 1]]);
        for (part, lanes) in codes.chunks(to.group_size()).take(split).enumerate() {
            let mut group = [0i8; 64];
            group[..lanes.len()].copy_from_slice(lanes);
            let at = at * split + part;
            out.set_scale(at, scale);
            let (base, high) = out.group(to, at);
            pack_group(to, &group, base, high);
        }
    }
    Ok(out.finish(to, rows, cols))
}

#[cfg(test)]
mod tests {
    use ninfer_core::WeightFormat;

    use super::*;
    use crate::encode;

    #[test]
    fn every_wider_format_holds_the_same_weights() {
        let all = [GroupFormat::Q4, GroupFormat::Q5, GroupFormat::Q6, GroupFormat::W8];
        for cols in [1, 63, 64, 65, 130, 256] {
            let w: Vec<f32> = (0..3 * cols).map(|i| ((i * 37 % 101) as f32 - 50.0) / 13.0).collect();
            for (i, from) in all.into_iter().enumerate() {
                let m = encode(WeightFormat::Group(from), 3, cols, &w).unwrap();
                for (j, to) in all.into_iter().enumerate() {
                    let got = widen(&m, to);
                    if j < i {
                        assert!(matches!(got, Err(Error::Conversion { .. })), "{from:?} to {to:?}");
                        continue;
                    }
                    let got = got.unwrap();
                    assert_eq!((got.format(), got.dequantize()), (WeightFormat::Group(to), m.dequantize()));
                    assert_eq!(PackedMatrix::new(3, cols, got.parts().clone()).unwrap(), got);
                }
            }
        }
    }

    #[test]
    fn the_code_that_no_encoder_writes_is_kept() {
        // −8 of Q4, in the last lane of a padded row.
        let mut base = vec![0u8; 64];
        base[31] = 0x80;
        let parts = PackedParts::Group {
            format: GroupFormat::Q4,
            base,
            high: Vec::new(),
            scales: [0x3C00u16, 0].iter().flat_map(|s| s.to_le_bytes()).collect(),
        };
        let m = PackedMatrix::new(1, 64, parts).unwrap();
        for to in [GroupFormat::Q5, GroupFormat::Q6, GroupFormat::W8] {
            assert_eq!(widen(&m, to).unwrap().dequantize()[63], -8.0);
        }
    }

    #[test]
    fn other_formats_are_refused() {
        let m = encode(WeightFormat::Bf16, 1, 4, &[1.0; 4]).unwrap();
        assert!(matches!(widen(&m, GroupFormat::W8), Err(Error::Conversion { .. })));
    }
}
