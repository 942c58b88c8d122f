//! Reads raw frames that ffmpeg writes to a pipe: YUV4MPEG2, whose header contains the size.

use std::io::{BufRead, Read};
use std::ops::ControlFlow;

use crate::picture::check_size;

/// A frame with 8 bits per sample: luma, then the two chroma planes.
pub(super) struct Planes {
    pub width: usize,
    pub height: usize,
    /// Whether chroma has half the width and height (4:2:0) instead of full size.
    pub is_yuv420: bool,
    bytes: Vec<u8>,
}

impl Planes {
    /// Luma and chroma.
    pub fn split(&self) -> [&[u8]; 3] {
        let luma = self.width * self.height;
        let (y, chroma) = self.bytes.split_at(luma);
        let (u, v) = chroma.split_at(chroma.len() / 2);
        [y, u, v]
    }
}

/// Maximum length of a header line.
const MAX_LINE: u64 = 1024;

/// Calls `each` with each frame and the pixel aspect ratio (width to height), until `each` breaks. An empty stream is
/// valid.
pub(super) fn read(
    stream: &mut impl BufRead,
    mut each: impl FnMut(&Planes, Option<[u32; 2]>) -> Result<ControlFlow<()>, String>,
) -> Result<(), String> {
    let Some(header) = line(stream)? else { return Ok(()) };
    let fields = header.strip_prefix("YUV4MPEG2 ").ok_or("ffmpeg's frames have no header")?;
    let field = |name: char| fields.split(' ').find_map(|field| field.strip_prefix(name)).unwrap_or_default();
    let side = |name: char| field(name).parse::<usize>().unwrap_or(0);
    let (width, height) = (side('W'), side('H'));
    check_size(width, height)?;
    let pixel_aspect = field('A').split_once(':').and_then(|(w, h)| Some([w.parse().ok()?, h.parse().ok()?]));
    let is_yuv420 = match field('C') {
        c if c.starts_with("420") => true,
        "444" => false,
        other => return Err(format!("ffmpeg gives frames of the kind `{other}`")),
    };
    let chroma = if is_yuv420 { width.div_ceil(2) * height.div_ceil(2) } else { width * height };
    let mut planes = Planes { width, height, is_yuv420, bytes: vec![0; width * height + 2 * chroma] };
    while let Some(line) = line(stream)? {
        if !line.starts_with("FRAME") {
            return Err("ffmpeg's frames are out of step".into());
        }
        stream.read_exact(&mut planes.bytes).map_err(|_| "ffmpeg broke off in the middle of a frame")?;
        if each(&planes, pixel_aspect)?.is_break() {
            break;
        }
    }
    Ok(())
}

/// The next line without its end; `None` at the end of the stream.
fn line(stream: &mut impl BufRead) -> Result<Option<String>, String> {
    let mut bytes = Vec::new();
    stream.take(MAX_LINE).read_until(b'\n', &mut bytes).map_err(|e| format!("ffmpeg cannot be read: {e}"))?;
    match bytes.pop() {
        None => Ok(None),
        Some(b'\n') => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
        Some(_) => Err("ffmpeg broke off between frames".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn y4m_frames_are_read_until_the_caller_breaks() {
        let mut stream = b"YUV4MPEG2 W4 H2 F25:1 Ip A4:3 C420mpeg2 XCOLORRANGE=LIMITED\n".to_vec();
        for frame in 0..3u8 {
            stream.extend(b"FRAME\n");
            stream.extend([frame; 8 + 4]);
        }
        let mut seen = Vec::new();
        read(&mut stream.as_slice(), |planes, pixel_aspect| {
            assert_eq!((planes.width, planes.height, pixel_aspect), (4, 2, Some([4, 3])));
            assert_eq!(planes.split().map(<[u8]>::len), [8, 2, 2]);
            seen.push(planes.split()[2][0]);
            Ok(if seen.len() == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })
        .unwrap();
        assert_eq!(seen, [0, 1]);
        let all = |bytes: &[u8]| read(&mut &*bytes, |_, _| Ok(ControlFlow::Continue(())));
        assert_eq!(all(b""), Ok(()));
        assert!(all(&stream[..stream.len() - 1]).unwrap_err().contains("in the middle"));
        assert!(all(b"YUV4MPEG2 W99999 H99999 C420\n").unwrap_err().contains("not accepted"));
        assert!(all(b"YUV4MPEG2 W4 H4 C420p10\nFRAME\n").is_err_and(|e| e.contains("middle") || e.contains("420p10")));
        assert!(all(b"RIFF").is_err() && all(&[b'x'; 5000]).is_err());
    }
}
