package files

import (
	"encoding/json"
	"fmt"
	"hash/crc32"
)

// envelope wraps a record on disk. It is the same in all versions.
type envelope struct {
	Version int `json:"version"`
	// CRC32 (IEEE) of the bytes of Body as they are in the file.
	CRC32 uint32          `json:"crc32"`
	Body  json.RawMessage `json:"body"`
}

// Seal returns the content of a record's file, in JSON with a checksum, for Unseal.
func Seal(version int, record any) ([]byte, error) {
	body, err := json.Marshal(record)
	if err != nil {
		return nil, err
	}
	return json.Marshal(envelope{Version: version, CRC32: crc32.ChecksumIEEE(body), Body: body})
}

// Unseal takes the record out of the content of its file. It is an error if the checksum is
// wrong; the caller checks the version.
func Unseal(data []byte) (version int, record json.RawMessage, err error) {
	var e envelope
	if err := json.Unmarshal(data, &e); err != nil {
		return 0, nil, fmt.Errorf("not a record: %w", err)
	}
	if sum := crc32.ChecksumIEEE(e.Body); sum != e.CRC32 {
		return 0, nil, fmt.Errorf("the checksum of the record is %d, the file says %d", sum, e.CRC32)
	}
	return e.Version, e.Body, nil
}
