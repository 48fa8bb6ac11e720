package mps

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/tessera-dra/tessera/pkg/files"
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

// Encode returns the content of the record's file.
func (r Record) Encode() ([]byte, error) { return files.Seal(recordVersion, r) }

// DecodeRecord returns the record of the daemon with this name from its file's
// content.
func DecodeRecord(name string, data []byte) (Record, error) {
	version, body, err := files.Unseal(data)
	if err != nil {
		return Record{}, err
	}
	if version != recordVersion {
		return Record{}, fmt.Errorf("there is no format %d here", version)
	}
	var r Record
	if err := json.Unmarshal(body, &r); err != nil {
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
