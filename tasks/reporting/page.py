from typing import TYPE_CHECKING
from tasks.reporting.collect import CampaignRecord
if TYPE_CHECKING:
    from tasks.artifacts.store import PolicyStore
def html_page(record: CampaignRecord, store: "PolicyStore") -> str:
    return f"<pre>{record.ledger.format()}</pre>"
