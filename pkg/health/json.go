package health

import (
	"encoding/json"
	"maps"
	"reflect"
	"strings"
)

// The types of the stored form keep the fields that they don't know, so that a newer
// version finds them after an older one has run for a while.

// UnmarshalJSON implements json.Unmarshaler.
func (s *State) UnmarshalJSON(data []byte) (err error) {
	type plain State
	*s = State{}
	s.extra, err = unmarshal(data, (*plain)(s))
	return err
}

// MarshalJSON implements json.Marshaler.
func (s State) MarshalJSON() ([]byte, error) {
	type plain State
	return marshal(plain(s), s.extra)
}

// UnmarshalJSON implements json.Unmarshaler.
func (c *Cause) UnmarshalJSON(data []byte) (err error) {
	type plain Cause
	*c = Cause{}
	c.extra, err = unmarshal(data, (*plain)(c))
	return err
}

// MarshalJSON implements json.Marshaler.
func (c Cause) MarshalJSON() ([]byte, error) {
	type plain Cause
	return marshal(plain(c), c.extra)
}

// UnmarshalJSON implements json.Unmarshaler.
func (e *Ending) UnmarshalJSON(data []byte) (err error) {
	type plain Ending
	*e = Ending{}
	e.extra, err = unmarshal(data, (*plain)(e))
	return err
}

// MarshalJSON implements json.Marshaler.
func (e Ending) MarshalJSON() ([]byte, error) {
	type plain Ending
	return marshal(plain(e), e.extra)
}

// UnmarshalJSON implements json.Unmarshaler.
func (r *Reset) UnmarshalJSON(data []byte) (err error) {
	type plain Reset
	*r = Reset{}
	r.extra, err = unmarshal(data, (*plain)(r))
	return err
}

// MarshalJSON implements json.Marshaler.
func (r Reset) MarshalJSON() ([]byte, error) {
	type plain Reset
	return marshal(plain(r), r.extra)
}

// UnmarshalJSON implements json.Unmarshaler.
func (f *Flap) UnmarshalJSON(data []byte) (err error) {
	type plain Flap
	*f = Flap{}
	f.extra, err = unmarshal(data, (*plain)(f))
	return err
}

// MarshalJSON implements json.Marshaler.
func (f Flap) MarshalJSON() ([]byte, error) {
	type plain Flap
	return marshal(plain(f), f.extra)
}

// unmarshal reads data into a pointer to a struct, and returns the fields that the
// struct doesn't have.
func unmarshal(data []byte, into any) (map[string]json.RawMessage, error) {
	if err := json.Unmarshal(data, into); err != nil {
		return nil, err
	}
	var all map[string]json.RawMessage
	if err := json.Unmarshal(data, &all); err != nil {
		return nil, err
	}
	known := reflect.TypeOf(into).Elem()
	for name := range all {
		for f := range known.Fields() {
			field, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			if field != "" && strings.EqualFold(field, name) {
				delete(all, name)
			}
		}
	}
	return all, nil
}

// marshal writes a struct together with other fields.
func marshal(s any, extra map[string]json.RawMessage) ([]byte, error) {
	data, err := json.Marshal(s)
	if err != nil || len(extra) == 0 {
		return data, err
	}
	all := maps.Clone(extra)
	// The struct's own fields are written over those of the same name.
	if err := json.Unmarshal(data, &all); err != nil {
		return nil, err
	}
	return json.Marshal(all)
}
