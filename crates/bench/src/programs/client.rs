//! A client of redis-server. The client sets values and gets each of them twice, in an order unrelated to the
//! order of setting. The client sends as many commands at once as the clients of a busy program have in
//! flight.

use crate::measure::Random;
use crate::stop::go_on;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

const VALUE_BYTES: usize = 1000;
/// Commands sent before answers are read.
const AT_ONCE: usize = 64;
/// Distance between two keys that are asked for in a row: a prime.
const STEP: usize = 1_000_003;

/// Returns a value of which half is noise.
fn value(key: usize) -> String {
    let mut random = Random::new(key as u64);
    let mut value = String::with_capacity(VALUE_BYTES + 16);
    while value.len() < VALUE_BYTES / 2 {
        write!(value, "{:016x}", random.next()).expect("a string takes everything");
    }
    while value.len() < VALUE_BYTES {
        value.push_str("and what all of them have, ");
    }
    value.truncate(VALUE_BYTES);
    value
}

struct Server {
    to: UnixStream,
    from: BufReader<UnixStream>,
}

impl Server {
    fn connect(socket: &Path) -> Result<Server, String> {
        let began = Instant::now();
        let to = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(error) if began.elapsed() > Duration::from_secs(20) => return Err(error.to_string()),
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
            go_on()?;
        };
        // With a limit, a client of a hanging server gets an error.
        let limit = Some(Duration::from_secs(120));
        let from = to.set_read_timeout(limit).and_then(|()| to.try_clone());
        Ok(Server { from: BufReader::new(from.map_err(|error| error.to_string())?), to })
    }

    /// Sends a command for each key, and checks each answer.
    fn ask(
        &mut self,
        keys: &[usize],
        command: impl Fn(usize) -> Vec<String>,
        answer: impl Fn(&mut BufReader<UnixStream>, usize) -> std::io::Result<bool>,
    ) -> Result<(), String> {
        for keys in keys.chunks(AT_ONCE) {
            let mut text = String::new();
            for key in keys {
                let words = command(*key);
                write!(text, "*{}\r\n", words.len()).expect("a string takes everything");
                words.iter().for_each(|word| {
                    write!(text, "${}\r\n{word}\r\n", word.len()).expect("a string takes everything");
                });
            }
            self.to.write_all(text.as_bytes()).map_err(|error| format!("redis-server: {error}"))?;
            for key in keys {
                match answer(&mut self.from, *key) {
                    Ok(true) => {}
                    Ok(false) => return Err(format!("redis-server: key {key} has another value")),
                    Err(error) => return Err(format!("redis-server: {error}")),
                }
            }
            go_on()?;
        }
        Ok(())
    }
}

/// Fills the server with about `bytes`, gets every value twice, and ends the server. Returns the number of
/// right values.
pub fn sets_and_gets(place: &Path, bytes: u64) -> Result<String, String> {
    let count = bytes as usize / (VALUE_BYTES + 100);
    let mut server = Server::connect(&place.join("socket"))?;
    let name = |key: usize| format!("key:{key}");
    let keys: Vec<usize> = (0..count).collect();
    let is_taken = |from: &mut BufReader<UnixStream>, _| {
        let mut line = String::new();
        match from.read_line(&mut line)? {
            0 => Err(std::io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(line == "+OK\r\n"),
        }
    };
    server.ask(&keys, |key| vec!["SET".into(), name(key), value(key)], is_taken)?;
    let order: Vec<usize> = (0..2 * count).map(|n| n * STEP % count).collect();
    let is_right = |from: &mut BufReader<UnixStream>, key| {
        let wanted = format!("${VALUE_BYTES}\r\n{}\r\n", value(key));
        let mut found = vec![0; wanted.len()];
        from.read_exact(&mut found).map(|()| found == wanted.as_bytes())
    };
    server.ask(&order, |key| vec!["GET".into(), name(key)], is_right)?;
    server.to.write_all(b"SHUTDOWN NOSAVE\r\n").map_err(|error| error.to_string())?;
    Ok(format!("{} values", order.len()))
}
