"""Files of any form -> documents, and what could not become one."""
