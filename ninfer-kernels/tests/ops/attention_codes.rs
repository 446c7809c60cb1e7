//! Quantised pages: codes and scales bit for bit, and attention over what they mean.

use half::f16;
use ninfer_core::ops::{Attend, KvLayer, KvScales, RopeAppend, RopeTable};
use ninfer_core::segment::{PAGE_TOKENS, Profile, Segment};
use ninfer_core::{DType, View};
use ninfer_kernels::cpu::Cpu;
use ninfer_quant::codes::{decode_e4m3, encode_e4m3};

use super::attention::frequencies;
use super::close::{GOLDEN, close};
use super::lab::{Lab, Mat};
use super::oracle;
use super::rng::Rng;

const HEADS: usize = 2;
const QUERY: usize = 4;
/// Physical page of each page of the sequence.
const TABLE: [i32; 3] = [2, 0, 1];

/// Features that share a scale, and the largest code.
fn group(dtype: DType, d: usize) -> (usize, f32) {
    if dtype == DType::I8 { (64, 127.0) } else { (d, 448.0) }
}

/// Codes of one vector with their scales, by the definition.
fn encode(dtype: DType, x: &[f32]) -> (Vec<u8>, Vec<f16>) {
    let (group, limit) = group(dtype, x.len());
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for x in x.chunks(group) {
        let scale = f16::from_f32(x.iter().fold(0.0f32, |most, x| most.max(x.abs())) / limit);
        let inverse = 1.0 / scale.to_f32();
        codes.extend(x.iter().map(|x| match dtype {
            DType::I8 => ((x * inverse).round_ties_even().clamp(-127.0, 127.0) as i8).cast_unsigned(),
            _ => encode_e4m3(x * inverse),
        }));
        scales.push(scale);
    }
    (codes, scales)
}

fn decode(dtype: DType, codes: &[u8], scales: &[f16]) -> Vec<f32> {
    let value = |c: u8| if dtype == DType::I8 { f32::from(c.cast_signed()) } else { decode_e4m3(c) };
    let group = group(dtype, codes.len()).0;
    codes.iter().enumerate().map(|(i, &c)| value(c) * scales[i / group].to_f32()).collect()
}

/// Pages of keys and of values, f32 or bytes, with the scales of quantised ones.
struct Pages {
    elements: [Mat<Cpu>; 2],
    scales: Option<[Mat<Cpu>; 2]>,
    layer: KvLayer<Cpu>,
}

impl Pages {
    fn new(lab: &mut Lab, dtype: DType, d: usize) -> Self {
        let rows = TABLE.len() * HEADS * PAGE_TOKENS;
        let elements = [(); 2].map(|()| match dtype {
            DType::F32 => lab.poisoned::<f32>(rows, d),
            _ => lab.poisoned::<u8>(rows, d),
        });
        let scales =
            (dtype.size() == 1).then(|| [(); 2].map(|()| lab.output::<f16>(rows, d.div_ceil(group(dtype, d).0))));
        let view = |m: &Mat<Cpu>| View::new(m.view.buffer().clone(), dtype, m.view.offset(), rows, d).unwrap();
        let layer = KvLayer {
            keys: view(&elements[0]),
            values: view(&elements[1]),
            scales: scales.as_ref().map(|[keys, values]| KvScales { keys: keys.v(), values: values.v() }),
            pages: lab.input(1, TABLE.len(), &TABLE).v(),
            heads: HEADS,
        };
        Self { elements, scales, layer }
    }
}

/// Projections of a sequence.
struct Rows {
    d: usize,
    count: usize,
    query_gate: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    gains: Vec<f32>,
}

impl Rows {
    fn new(d: usize, count: usize) -> Self {
        let mut rng = Rng::new((d * 1000 + count) as u64);
        let query_gate = rng.values(count * QUERY * 2 * d, 1.0);
        let mut rows = |size| rng.values(count * HEADS * d, size);
        let (key, value) = (rows(1.0), rows(3.0));
        Self { d, count, query_gate, key, value, gains: rng.values(2 * d, 0.3) }
    }

    /// Row of the page matrices.
    fn place(head: usize, position: usize) -> usize {
        (TABLE[position / PAGE_TOKENS] as usize * HEADS + head) * PAGE_TOKENS + position % PAGE_TOKENS
    }

    fn segments(&self) -> [Segment; 1] {
        [Segment { len: self.count as u32, ..Segment::default() }]
    }

    /// Fills pages and returns the queries.
    fn append(&self, lab: &mut Lab, pages: &Pages) -> Vec<f32> {
        let (d, count) = (self.d, self.count);
        let query = lab.output::<f32>(count, QUERY * d);
        let op = RopeAppend {
            batch: lab.batch(Profile::Prefill, count, &self.segments()),
            query_gate: lab.input(count, QUERY * 2 * d, &self.query_gate).v(),
            key: lab.input(count, HEADS * d, &self.key).v(),
            value: lab.input(count, HEADS * d, &self.value).v(),
            gains: lab.input(2, d, &self.gains).v(),
            eps: 1e-6,
            rope: RopeTable { frequencies: lab.input(1, d / 4, &frequencies(d / 4)).v(), magnitude: 1.0, shift: 0 },
            query: query.v(),
            kv: pages.layer.clone(),
        };
        lab.run(|r| r.rope_append(op));
        lab.read(&query)
    }

    fn attend(&self, lab: &mut Lab, query: &[f32], kv: KvLayer<Cpu>) -> Vec<f32> {
        let (d, count) = (self.d, self.count);
        let output = lab.output::<f32>(count, QUERY * d);
        let op = Attend {
            batch: lab.batch(Profile::Prefill, count, &self.segments()),
            query: lab.input(count, QUERY * d, query).v(),
            query_gate: lab.input(count, QUERY * 2 * d, &self.query_gate).v(),
            kv,
            first_key: 0,
            output: output.v(),
        };
        lab.run(|r| r.attend(op));
        lab.read(&output)
    }
}

fn check(dtype: DType, d: usize, count: usize) {
    let rows = Rows::new(d, count);
    let mut plain = Lab::cpu();
    let elements = Pages::new(&mut plain, DType::F32, d);
    rows.append(&mut plain, &elements);
    let mut lab = Lab::cpu().with_gaps(1, 2);
    let coded = Pages::new(&mut lab, dtype, d);
    let query = rows.append(&mut lab, &coded);

    // The elements that f32 pages hold are what was encoded; pages of what the codes mean are what attention reads.
    let mut meant = [(); 2].map(|()| vec![0.0f32; TABLE.len() * HEADS * PAGE_TOKENS * d]);
    let scales = coded.scales.as_ref().unwrap();
    let groups = d.div_ceil(group(dtype, d).0);
    for i in 0..2 {
        let x = plain.read::<f32>(&elements.elements[i]);
        let (codes, scales) = (lab.read::<u8>(&coded.elements[i]), lab.read::<f16>(&scales[i]));
        let written: Vec<usize> = (0..count).flat_map(|p| (0..HEADS).map(move |h| Rows::place(h, p))).collect();
        for row in 0..TABLE.len() * HEADS * PAGE_TOKENS {
            let (c, s) = (&codes[row * d..][..d], &scales[row * groups..][..groups]);
            if !written.contains(&row) {
                assert!(c.iter().all(|&c| c == 0xff) && s.iter().all(|s| s.to_bits() == 0xffff), "row {row}");
                continue;
            }
            assert_eq!((c.to_vec(), s.to_vec()), encode(dtype, &x[row * d..][..d]), "row {row} of {dtype} pages");
            meant[i][row * d..][..d].copy_from_slice(&decode(dtype, c, s));
        }
    }
    let got = rows.attend(&mut lab, &query, coded.layer);
    let pages = meant.map(|m| plain.input(m.len() / d, d, &m).v());
    let [keys, values] = pages;
    let expected = rows.attend(&mut plain, &query, KvLayer { keys, values, ..elements.layer });
    close(&format!("{dtype} pages"), &got, &oracle::wide(&expected), GOLDEN);
}

#[test]
fn quantised_pages_hold_the_codes_of_the_definition() {
    for dtype in [DType::I8, DType::F8E4M3] {
        for (d, count) in [(64, 1), (256, 70), (128, 129), (8, 65), (72, 3), (36, 66)] {
            check(dtype, d, count);
        }
    }
}
