package journal

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"regexp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// version is the version that this package writes, and the newest that it
// reads.
const version = 1

// ErrNewerVersion says that a file was written by a plugin whose files this
// one must not touch.
var ErrNewerVersion = errors.New("written by a newer version of the plugin")

// envelope wraps a record on disk. It is the same in all versions.
type envelope struct {
	Version int `json:"version"`
	// CRC32 (IEEE) of the bytes of Body as they are in the file.
	CRC32 uint32          `json:"crc32"`
	Body  json.RawMessage `json:"body"`
}

// encode returns the bytes of a record's file.
func encode[R record](r R) ([]byte, error) {
	body, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	data, err := json.Marshal(envelope{Version: version, CRC32: crc32.ChecksumIEEE(body), Body: body})
	if err != nil {
		return nil, err
	}
	return append(data, '\n'), nil
}

// decode reads the bytes of the file named by key. ErrNewerVersion comes only
// from a file that is whole: damage never looks like a newer version.
func decode[R record](key string, data []byte) (R, error) {
	var none, r R
	body, err := open(data)
	if err != nil {
		return none, err
	}
	if err := json.Unmarshal(body, &r); err != nil {
		return none, fmt.Errorf("record: %w", err)
	}
	if r.Key() != key {
		return none, fmt.Errorf("the record is of %q", r.Key())
	}
	return r, nil
}

// open takes the body out of the envelope.
func open(data []byte) (json.RawMessage, error) {
	var e envelope
	if err := json.Unmarshal(data, &e); err != nil {
		return nil, fmt.Errorf("not a journal file: %w", err)
	}
	if sum := crc32.ChecksumIEEE(e.Body); sum != e.CRC32 {
		return nil, fmt.Errorf("the checksum of the record is %d, the file says %d", sum, e.CRC32)
	}
	if e.Version > version {
		return nil, fmt.Errorf("%w (format %d, this one reads up to %d)", ErrNewerVersion, e.Version, version)
	}
	if e.Version < 1 {
		return nil, fmt.Errorf("there is no format %d", e.Version)
	}
	return e.Body, nil
}

// claimPattern and grantPattern find in a damaged file what encode wrote.
var claimPattern = regexp.MustCompile(`"namespace":"([^"]{1,63})","name":"([^"]{1,253})","bootID":"([^"]{0,64})"`)

var grantPattern = regexp.MustCompile(`"device":"([^"]{1,63})","gpu":"(GPU-[0-9a-fA-F-]{36})"(?:,"request":"([^"]{0,127})"(,"admin":true)?)?`)

// salvage makes out what it can in a claim's damaged file: the claim's name, its boot
// and its grants are each there or empty. A grant that is cut off
// before it says whether it is an admin's counts as one that holds its device.
func salvage(claimUID string, data []byte) holding.Record {
	r := holding.Record{ClaimUID: claimUID}
	if m := claimPattern.FindSubmatch(data); m != nil {
		r.Namespace, r.Name, r.BootID = string(m[1]), string(m[2]), string(m[3])
	}
	for _, m := range grantPattern.FindAllSubmatch(data, -1) {
		r.Holdings = append(r.Holdings, holding.Holding{
			Device:  gpu.DeviceName(m[1]),
			GPU:     gpu.UUID(m[2]),
			Request: string(m[3]),
			Admin:   len(m[4]) > 0,
		})
	}
	return r
}
