package mps

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
)

const (
	recordVersion = 1
	// maxRecordSize is far above what the devices of one node can fill.
	maxRecordSize = 64 << 10
)

// Record is the supervisor's record of a daemon, stored in the daemon's directory.
type Record struct {
	Daemon Daemon `json:"daemon"`
	// PID of the control daemon; 0 before it runs.
	PID int `json:"pid,omitempty"`
	// Start of that process, as in /proc/PID/stat, because process IDs are reused.
	Start uint64 `json:"start,omitempty"`
	// BootID that Start counts from.
	BootID   string `json:"bootID,omitempty"`
	Restarts int    `json:"restarts,omitempty"`
	// Stopping: it is being stopped.
	Stopping bool `json:"stopping,omitempty"`
}

// envelope wraps a record on disk.
type envelope struct {
	Version int `json:"version"`
	// CRC32 (IEEE) of the bytes of Body as they are in the file.
	CRC32 uint32          `json:"crc32"`
	Body  json.RawMessage `json:"body"`
}

// Encode returns the content of the record's file.
func (r Record) Encode() ([]byte, error) {
	body, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	return json.Marshal(envelope{Version: recordVersion, CRC32: crc32.ChecksumIEEE(body), Body: body})
}

// DecodeRecord returns the record of the daemon with this name from its file's
// content.
func DecodeRecord(name string, data []byte) (Record, error) {
	var e envelope
	if err := json.Unmarshal(data, &e); err != nil {
		return Record{}, fmt.Errorf("not a record: %w", err)
	}
	if e.Version != recordVersion {
		return Record{}, fmt.Errorf("there is no format %d here", e.Version)
	}
	if sum := crc32.ChecksumIEEE(e.Body); sum != e.CRC32 {
		return Record{}, fmt.Errorf("the checksum is %d, the file says %d", sum, e.CRC32)
	}
	var r Record
	if err := json.Unmarshal(e.Body, &r); err != nil {
		return Record{}, fmt.Errorf("not a record: %w", err)
	}
	if r.Daemon.Name != name {
		return Record{}, fmt.Errorf("the record is of %q", r.Daemon.Name)
	}
	if r.PID < 0 || r.Restarts < 0 {
		return Record{}, errors.New("negative numbers in the record")
	}
	return r, r.Daemon.Validate()
}

// ReadRecord reads the record of a daemon.
func (d RunDir) ReadRecord(name string) (Record, error) {
	f, err := os.Open(d.record(name))
	if err != nil {
		return Record{}, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxRecordSize))
	if err != nil {
		return Record{}, err
	}
	return DecodeRecord(name, data)
}
