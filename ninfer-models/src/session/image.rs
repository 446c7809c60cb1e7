//! Images of a lane's committed state: copied to the host, written as bytes, and put back.

use ninfer_core::backend::InferenceBackend;
use ninfer_core::ops::KvLayer;
use ninfer_core::segment::PAGE_TOKENS;
use ninfer_core::state::Snapshot;
use ninfer_core::view::View;
use ninfer_core::{Error, Result};

use super::Session;
use super::cache::{KEPT, RING};
use super::lane::Lane;

/// First bytes of a written image.
const MAGIC: [u8; 8] = *b"NINFLANE";
/// Header: magic, version, then six u64 (fingerprint, position, MTP rows, recurrent bytes, payload length, checksum).
const HEADER: usize = 8 + 8 + 6 * 8;
/// Bytes of the recent tokens.
const RECENT: usize = RING * 4;
/// Layout version.
const VERSION: u64 = 2;

/// The committed state of one lane on the host: recurrent matrices, convolution windows, keys and values of the used
/// pages with their scales, hidden states for MTP, token counts and position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaneImage {
    fingerprint: u64,
    position: usize,
    mtp_rows: usize,
    /// Bytes of the recurrent state at the start of the payload, behind the recent tokens.
    recurrent: usize,
    payload: Vec<u8>,
}

impl LaneImage {
    /// Tokens in the state.
    #[must_use]
    pub fn position(&self) -> usize {
        self.position
    }

    /// Size of the state in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.payload.len()
    }

    /// The recurrent state of all layers: convolution windows and matrices.
    #[must_use]
    pub fn recurrent(&self) -> &[u8] {
        self.payload.get(RECENT..RECENT + self.recurrent).unwrap_or(&[])
    }

    /// The image as bytes: magic, version, lengths, a checksum, then the payload.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEADER + self.payload.len());
        out.extend_from_slice(&MAGIC);
        let fields = [
            VERSION,
            self.fingerprint,
            self.position as u64,
            self.mtp_rows as u64,
            self.recurrent as u64,
            self.payload.len() as u64,
            self.checksum(),
        ];
        fields.iter().for_each(|f| out.extend_from_slice(&f.to_le_bytes()));
        out.extend_from_slice(&self.payload);
        out
    }

    /// Reads what [`LaneImage::to_bytes`] wrote.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for a wrong magic, version, length or checksum.
    pub fn from_bytes(bytes: &[u8]) -> Result<Snapshot<Self>> {
        let corrupt = |reason: &str| Error::Corrupt { reason: reason.to_owned() };
        let (header, payload) = bytes.split_at_checked(HEADER).ok_or_else(|| corrupt("shorter than its header"))?;
        if header[..8] != MAGIC {
            return Err(corrupt("not a lane image"));
        }
        let mut fields = [0u64; 7];
        for (field, word) in fields.iter_mut().zip(header[8..].as_chunks::<8>().0) {
            *field = u64::from_le_bytes(*word);
        }
        let [version, fingerprint, position, mtp_rows, recurrent, length, checksum] = fields;
        if version != VERSION {
            return Err(corrupt(&format!("version {version}, expected {VERSION}")));
        }
        if length != payload.len() as u64 {
            return Err(corrupt(&format!("{} bytes of payload, header says {length}", payload.len())));
        }
        let small = |x: u64| usize::try_from(x).map_err(|_| corrupt("a position that does not fit"));
        let image = Self {
            fingerprint,
            position: small(position)?,
            mtp_rows: small(mtp_rows)?,
            recurrent: small(recurrent)?,
            payload: payload.to_vec(),
        };
        if image.checksum() != checksum {
            return Err(corrupt("checksum does not match"));
        }
        Ok(Snapshot::verified(image))
    }

    fn checksum(&self) -> u64 {
        let mut hash = fnv(FNV_START, &self.payload);
        for field in [self.fingerprint, self.position as u64, self.mtp_rows as u64, self.recurrent as u64] {
            hash = fnv(hash, &field.to_le_bytes());
        }
        hash
    }
}

const FNV_START: u64 = 0xcbf2_9ce4_8422_2325;

/// FNV-1a over eight bytes at a time.
fn fnv(mut hash: u64, bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    for word in words {
        hash = (hash ^ u64::from_le_bytes(*word)).wrapping_mul(0x0100_0000_01b3);
        hash ^= hash >> 29;
    }
    for byte in rest {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash
}

/// A contiguous part of the state, and which of its rows mean something.
struct Part<B: InferenceBackend> {
    view: View<B>,
    used: Used,
}

#[derive(Clone, Copy)]
enum Used {
    All,
    /// The first tokens of each head of a page.
    Tokens(usize),
    /// Hidden states of the last positions before this one.
    Ring(usize),
}

impl<B: InferenceBackend> Part<B> {
    /// Zeroes rows without meaning, so that equal states have equal images.
    fn clear_unused(&self, bytes: &mut [u8]) {
        let row = self.view.cols() * self.view.dtype().size();
        for (i, bytes) in bytes.chunks_exact_mut(row.max(1)).enumerate() {
            let used = match self.used {
                Used::All => true,
                Used::Tokens(tokens) => i % PAGE_TOKENS < tokens,
                Used::Ring(position) => (position.saturating_sub(KEPT)..position).any(|p| p % RING == i),
            };
            if !used {
                bytes.fill(0);
            }
        }
    }
}

impl<B: InferenceBackend> Session<B> {
    /// Distinguishes images of models with other shapes or dtypes.
    fn fingerprint(&self) -> u64 {
        let facts = format!(
            "{:?} {} {:?} {}",
            self.model.config().shape(),
            self.cache.hidden.dtype(),
            self.cache.kv.first().map(|kv| kv.keys.dtype()),
            self.limits.mtp,
        );
        fnv(FNV_START, facts.as_bytes())
    }

    /// The parts of a lane's state in a fixed order.
    fn parts(&self, lane: &Lane, position: usize, mtp_rows: usize) -> Result<Vec<Part<B>>> {
        let slot = lane.reserved.slot as usize;
        let of_slot = |view: &View<B>, slots: usize| {
            let rows = view.rows() / slots;
            view.row_range(slot * rows..(slot + 1) * rows)
        };
        let slots = self.limits.lanes;
        let mut parts = Vec::new();
        for gdn in &self.cache.gdn {
            parts.push(Part { view: of_slot(&gdn.state.window, slots)?, used: Used::All });
            parts.push(Part { view: of_slot(&gdn.state.matrix, slots)?, used: Used::All });
        }
        let mut pages = |kv: &KvLayer<B>, tokens: usize| -> Result<()> {
            let rows = kv.heads * PAGE_TOKENS;
            for (i, &page) in lane.reserved.pages.iter().take(tokens.div_ceil(PAGE_TOKENS)).enumerate() {
                let range = page as usize * rows..(page as usize + 1) * rows;
                let used = Used::Tokens((tokens - i * PAGE_TOKENS).min(PAGE_TOKENS));
                let scales = kv.scales.iter().flat_map(|scales| [&scales.keys, &scales.values]);
                for view in [&kv.keys, &kv.values].into_iter().chain(scales) {
                    parts.push(Part { view: view.row_range(range.clone())?, used });
                }
            }
            Ok(())
        };
        for kv in &self.cache.kv {
            pages(kv, position)?;
        }
        if let Some(kv) = &self.cache.mtp_kv {
            pages(kv, mtp_rows + 1)?;
            let view = self.cache.hidden.row_range(slot * RING..(slot + 1) * RING)?;
            parts.push(Part { view, used: Used::Ring(position) });
        }
        parts.push(Part { view: of_slot(&self.cache.counts, slots)?, used: Used::All });
        Ok(parts)
    }

    pub(super) fn take_image(&mut self, lane: &Lane) -> Result<LaneImage> {
        lane.check(0)?;
        // The row of an anchor that is not an input yet is left out: it is made again when the lane goes on.
        let mtp_rows = lane.mtp_rows.min(lane.position.saturating_sub(1));
        let mut payload: Vec<u8> = lane.recent.iter().flat_map(|t| t.to_le_bytes()).collect();
        for part in self.parts(lane, lane.position, mtp_rows)? {
            let at = payload.len();
            payload.resize(at + part.view.span_bytes(), 0);
            self.model.backend().download(&mut self.queue, &part.view, &mut payload[at..])?;
            part.clear_unused(&mut payload[at..]);
        }
        let gdn = self.cache.gdn.iter().map(|g| g.state.window.span_bytes() + g.state.matrix.span_bytes());
        Ok(LaneImage {
            fingerprint: self.fingerprint(),
            position: lane.position,
            mtp_rows,
            recurrent: gdn.sum::<usize>() / self.limits.lanes,
            payload,
        })
    }

    pub(super) fn put_image(&mut self, lane: &mut Lane, image: &LaneImage) -> Result<()> {
        let corrupt = |reason: &str| Error::Corrupt { reason: reason.to_owned() };
        if image.fingerprint != self.fingerprint() {
            return Err(corrupt("it was taken from a model or session of another shape"));
        }
        if image.position > lane.capacity {
            return Err(Error::ContextOverflow { requested: image.position, limit: lane.capacity });
        }
        if image.mtp_rows > image.position {
            return Err(corrupt("more MTP rows than tokens"));
        }
        let parts = self.parts(lane, image.position, image.mtp_rows)?;
        let expected = RECENT + parts.iter().map(|p| p.view.span_bytes()).sum::<usize>();
        if image.payload.len() != expected {
            return Err(corrupt(&format!("{} bytes of state, expected {expected}", image.payload.len())));
        }
        let (tokens, mut rest) = image.payload.split_at(RECENT);
        for (token, bytes) in lane.recent.iter_mut().zip(tokens.as_chunks::<4>().0) {
            *token = u32::from_le_bytes(*bytes);
        }
        for part in parts {
            let (bytes, after) = rest.split_at(part.view.span_bytes());
            self.model.backend().upload(&mut self.queue, &part.view, bytes)?;
            rest = after;
        }
        lane.position = image.position;
        lane.mtp_rows = image.mtp_rows;
        Ok(())
    }
}
